"""Reasoning and tool parsers: real-looking outputs, any cutting, hostile text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.core.output_parsing.output_parser import (
    OutputParser,
    ParsedMessage,
    ParsedToolCall,
    fold,
)
from jackfield.core.protocols.parsers import ParserEvent, ToolCallEnd
from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.clock import growth
from jackfield.plugins.parsing.json_scanner import JsonScanner
from jackfield.plugins.reasoning.think_tags import Qwen3Reasoning
from jackfield.plugins.tools.hermes import HermesToolParser

Make = Callable[[], Any]


def events(parser: Any, pieces: list[str]) -> list[ParserEvent]:
    return [*(e for piece in pieces for e in parser.feed(piece)), *parser.finish()]


def parsed(parser: Any, text: str) -> ParsedMessage:
    return fold(events(parser, [text]))


def call(name: str, arguments: str) -> ParsedToolCall:
    return ParsedToolCall(name, arguments)


THOUGHTS = [
    (True, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    (True, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    (True, "\n<think>Hm", "Hm", None),
    (True, "<think>\n\n</think>\n\nYes.", None, "Yes."),
    (True, "a <b </thin> c</think>d</think>e<think>", "a <b </thin> c", "d</think>e<think>"),
    (True, "no tags at all", "no tags at all", None),
    (True, "cut </th", "cut </th", None),
    (True, "<thi", "<thi", None),
    (True, "a\n\nb\n\n</think>c\n\n", "a\n\nb", "c\n\n"),
    (False, "Yes.", None, "Yes."),
    (False, "\n\nYes </think>", None, "\n\nYes </think>"),
    (False, "<think>\nstill</think>Yes", "still", "Yes"),
    (False, "<thin", None, "<thin"),
    (True, "", None, None),
]


@pytest.mark.parametrize(("thinking", "text", "reasoning", "content"), THOUGHTS)
def test_reasoning_and_content(
    thinking: bool, text: str, reasoning: str | None, content: str | None
) -> None:
    message = parsed(Qwen3Reasoning(thinking=thinking), text)
    assert (message.reasoning, message.content) == (reasoning, content)


WEATHER = '{"city": "Paris",  "days": [1, 2.5e3, null], "note": "a \\"}\\" b"}'
OUTPUTS = [
    ("Hello.", "Hello.", []),
    (
        f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>',
        None,
        [call("weather", WEATHER)],
    ),
    (
        'Let me look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"x": {"y": []}}, "name": "g"}\n</tool_call>\n',
        "Let me look.",
        [call("f", "{}"), call("g", '{"x": {"y": []}}')],
    ),
    (
        'A <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> B\n',
        "A  B",
        [call("f", '{"a": 1}')],
    ),
    ('<tool_call>{"name": "f"}</tool_call>', None, [call("f", "{}")]),
    ('<tool_call>{"id": 7, "name": "f", "arguments": {}}</tool_call>', None, [call("f", "{}")]),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>',
        None,
        [call("f", '{"a": 1}')],
    ),
    ('<tool_call>{"name": "f", "arguments": {"a": "x', None, [call("f", '{"a": "x')]),
    (
        '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}',
        None,
        [call("f", "{}"), call("g", "{}")],
    ),
    ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
    ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ('<tool_call>{"name": "f", "arguments": "{}"}', None, [call("f", "{}")]),
    (
        '<tool_call>{"name": "f", "arguments": "[]"}',
        '<tool_call>{"name": "f", "arguments": "[]"}',
        [],
    ),
    ('<tool_call>{"arguments": {"a": 1', '<tool_call>{"arguments": {"a": 1', []),
    ('<tool_call> <tool_call>{"name": "f"}', "<tool_call>", [call("f", "{}")]),
    (
        '<tool_call>{"name": "f", "arguments": {"a": nul!}} x</tool_call> y',
        "y",
        [call("f", '{"a": nul')],
    ),
    ("a < b <tool_cal", "a < b <tool_cal", []),
    ('<tool_call>{"n\\u0061me": "f\\n", "arguments": {}}', None, [call("f\n", "{}")]),
    ("  \n", "  \n", []),
    ('A<tool_call>{"name": "f", "arguments": {}}\n b', "A\n b", [call("f", "{}")]),
]


@pytest.mark.parametrize(("text", "content", "calls"), OUTPUTS)
def test_tool_calls_of_real_looking_outputs(
    text: str, content: str | None, calls: list[ParsedToolCall]
) -> None:
    assert parsed(HermesToolParser(), text) == ParsedMessage(content, None, calls)
    assert fold(events(HermesToolParser(), list(text))) == ParsedMessage(content, None, calls)


def test_arguments_stream_as_they_arrive() -> None:
    parser = HermesToolParser()
    assert parser.feed('<tool_call>{"name": "f", "arguments": ') == []
    first = parser.feed('{"a')
    assert fold(first).tool_calls == [call("f", '{"a')]
    second = parser.feed('": 1')
    assert [e.fragment for e in second] == ['": 1']  # type: ignore[union-attr]
    last = parser.feed("}}</tool_call>")
    assert last[0].fragment == "}" and isinstance(last[1], ToolCallEnd)  # type: ignore[union-attr]


FRAGMENTS = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool", "_call>", "</", "<", ">"),
        *("\n", " ", "x", "é🙂", "{", "}", "[", "]", ",", ":", '"', "\\", '"name"', '"arguments"'),
        *('{"name": "f", "arguments": {', '"a": 1', '{"arguments": {}, "name": "g"}', "tru", "-0."),
        *('<tool_call>{"name": "f", "arguments": {"k": "v"}}', "}" * 70, '"\\u00', "1e5", "null"),
    ]
)
PARSERS: dict[str, Make] = {
    "thinking": lambda: Qwen3Reasoning(thinking=True),
    "not thinking": lambda: Qwen3Reasoning(thinking=False),
    "hermes": HermesToolParser,
    "both": lambda: OutputParser(Qwen3Reasoning(thinking=True), HermesToolParser()),
}


@pytest.mark.parametrize("make", PARSERS.values(), ids=list(PARSERS))
@settings(max_examples=300, deadline=None)
@given(parts=st.lists(FRAGMENTS, max_size=25), cuts=st.lists(st.integers(0, 400), max_size=12))
def test_any_cutting_gives_the_same_fold(make: Make, parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(at)]
    whole = parsed(make(), text)
    assert fold(events(make(), pieces)) == whole
    assert fold(events(make(), list(text))) == whole
    assert fold(events(make(), ["", *pieces, ""])) == whole


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_characters="<"), max_size=50))
def test_text_without_markup_is_passed_on_as_it_is(text: str) -> None:
    assert parsed(HermesToolParser(), text).content == (text or None)
    assert parsed(Qwen3Reasoning(thinking=False), text).content == (text or None)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    arguments=st.dictionaries(st.text(max_size=4), JSON, max_size=3),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    name_first=st.booleans(),
)
def test_every_json_object_comes_through_exactly(
    arguments: dict[str, Any], indent: int | None, ascii_only: bool, name_first: bool
) -> None:
    source = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    pair = ['"name": "f"', f'"arguments": {source}']
    text = "<tool_call>{" + ", ".join(pair if name_first else pair[::-1]) + "}</tool_call>"
    assert parsed(HermesToolParser(), text) == ParsedMessage(None, None, [call("f", source)])


def is_json_prefix_end(text: str) -> tuple[str, int]:
    """What the scanner says of a text, fed character by character."""
    scanner = JsonScanner()
    for index, char in enumerate(text):
        status, end = scanner.scan(char)
        if status != "more":
            return status, index + end
    return "more", len(text)


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from([*'{}[]:,"\\ -0.1eE+', "true", "null", '"a"', "nul"]), max_size=12
    )
)
def test_the_scanner_accepts_what_the_json_module_accepts(parts: list[str]) -> None:
    text = "".join(parts).lstrip()
    assert is_json_prefix_end(text) == JsonScanner().scan(text)
    closed = text + "\n!"
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(closed)
    except ValueError:
        assert JsonScanner().scan(closed)[0] != "done"
        return
    status, ours = JsonScanner().scan(closed)
    # The json module lets "1." and "1e" end after the digit; JSON has no such numbers.
    assert (status, ours) == ("done", end) or (status == "bad" and closed[end] in ".eE")


HOSTILE = {
    "braces": "{" * 400_000,
    "open tags": "<tool_call>" * 36_000,
    "nested objects": '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 80_000,
    "nested lists": '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 400_000,
    "nested before the name": '<tool_call>{"arguments": {"a": ' + "[" * 400_000,
    "escapes": '<tool_call>{"name": "' + "\\\\" * 200_000,
    "partial tags": "<tool_cal" * 44_000,
    "newlines": "\n" * 400_000,
    "many calls": '<tool_call>{"name": "f", "arguments": {}}' * 4_800,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
@pytest.mark.parametrize("size", [1_000_000, 7])
def test_hostile_text_takes_linear_time(text: str, size: int) -> None:
    def parse(length: int) -> None:
        pieces = [text[i : min(i + size, length)] for i in range(0, length, size)]
        events(OutputParser(Qwen3Reasoning(thinking=False), HermesToolParser()), pieces)

    # Ten times the text; quadratic work would be a hundred times as long.
    length = len(text) if size == 1_000_000 else len(text) // 4
    assert growth(lambda: parse(length // 10), lambda: parse(length), bar=40) < 40


def test_the_parsers_are_registered() -> None:
    plugins = load_plugins()
    assert plugins["tool_parser"].load("hermes") is HermesToolParser
    assert plugins["reasoning_parser"].load("qwen3") is Qwen3Reasoning


def test_reasoning_then_text_then_calls_through_the_chain() -> None:
    text = (
        "<think>\nI need <tool_call>.\n</think>\n\nWait.\n"
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    )
    whole = ParsedMessage("Wait.", "I need <tool_call>.", [call("f", "{}")])
    parser = OutputParser(Qwen3Reasoning(), HermesToolParser())
    assert fold(events(parser, list(text))) == whole
    assert fold(events(OutputParser(None, None), ["a", "", "b"])) == ParsedMessage("ab")


def test_the_chain_reports_when_reasoning_has_ended() -> None:
    parser = OutputParser(Qwen3Reasoning(), HermesToolParser())
    texts = []
    for piece in ("<think>", "Hm.", "</think>", "Yes."):
        parser.feed(piece)
        texts.append(parser.reasoning_ended)
    assert texts == [False, False, True, True]
    assert OutputParser(None, HermesToolParser()).reasoning_ended
