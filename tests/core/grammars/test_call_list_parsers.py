"""Answers that are calls: any cutting of the text gives the same calls."""

from __future__ import annotations

import json
import random

import pytest

from jackfield.core.output_parsing.constrained_calls import CallList, CallsOrText, NamedCall
from jackfield.core.output_parsing.output_parser import OutputParser, fold

CALLS = [
    ("weather", {"city": 'Lis"bon\\', "days": [1, {"deep": "}]"}], "é": "🙂"}),
    ('odd "name"\\', {}),
    ("add", {"name": "x", "parameters": {"name": 1}}),
]


def written(indent: int | None) -> str:
    return json.dumps(
        [{"name": name, "parameters": parameters} for name, parameters in CALLS],
        indent=indent,
        ensure_ascii=indent is None,
    )


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("seed", range(5))
def test_a_list_of_calls_survives_any_cutting(indent: int | None, seed: int) -> None:
    text, draw = written(indent), random.Random(seed)
    parser, events = OutputParser(None, CallList()), []
    while text:
        cut = draw.choice([1, 2, 7, len(text)]) if seed else len(text)
        events += parser.feed(text[:cut])
        text = text[cut:]
    message = fold(events + parser.finish())
    assert message.content is None
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == CALLS
    assert all(c.arguments == c.arguments.strip() for c in message.tool_calls)


def test_a_list_that_is_cut_off_keeps_what_there_was() -> None:
    parser = CallList()
    text = '[{"name": "a", "parameters": {"x": 1}}, {"name": "b", "parameters": {"y": "ha'
    message = fold(parser.feed(text) + parser.finish())
    assert [(c.name, c.arguments) for c in message.tool_calls] == [
        ("a", '{"x": 1}'),
        ("b", '{"y": "ha'),
    ]


def test_a_named_call_is_all_of_the_answer() -> None:
    parser = NamedCall("add")
    events = parser.feed('{"a"') + parser.feed("") + parser.feed(": 3}") + parser.finish()
    (call,) = fold(events).tool_calls
    assert (call.name, call.arguments) == ("add", '{"a": 3}')
    assert NamedCall("add").finish() == []


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "called"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {}}</tool_call>', True),
        ('{"said": "<tool_call>{\\"name\\": \\"f\\", \\"arguments\\": {}}</tool_call>"}', False),
        ("<tool", False),
        ("", False),
    ],
)
def test_an_answer_is_calls_or_all_content(text: str, called: bool, size: int) -> None:
    from jackfield.plugins.tools.hermes import HermesToolParser

    parser = CallsOrText.of(HermesToolParser, ["<tool_call>"])(tools=())
    events = [e for at in range(0, len(text), size) for e in parser.feed(text[at : at + size])]
    message = fold([*events, *parser.finish()])
    assert [call.name for call in message.tool_calls] == (["f"] if called else [])
    assert (message.content or "") == ("" if called else text)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('<tool_call>\n{"name": "f', ""),
        ("<tool_call>", ""),
        ('{"a', '{"a'),
        ('[{"name": "f', '[{"name": "f'),
    ],
)
def test_a_call_cut_off_before_its_name_is_no_content(text: str, content: str) -> None:
    from jackfield.plugins.tools.hermes import HermesToolParser

    opens = ["<tool_call>", "["]
    for size in (1, 3, 99):
        parser = CallsOrText.of(HermesToolParser, opens)(tools=())
        events = [e for i in range(0, len(text), size) for e in parser.feed(text[i : i + size])]
        assert fold([*events, *parser.finish()]).content == (content or None)
