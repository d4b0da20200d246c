"""Parsers that a checkpoint's response template declares pass the kits, and read outputs as
transformers does."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
from reasoning_kit import Kit as ThoughtKit
from tool_kit import BlockKit
from transformers.utils.chat_parsing import parse_response

from jackfield.core.output_parsing.output_parser import OutputParser, ParsedMessage, fold
from jackfield.core.output_parsing.reasoning_parser import make_parser
from jackfield.core.protocols.parsers import Content, Reasoning
from jackfield.plugins.conformance.parsers import Sample, cut, run, tool
from jackfield.plugins.parsing.response_template import read_template
from jackfield.plugins.reasoning.hf import MAX_LEAD, HfReasoning
from jackfield.plugins.tools.hf import HfToolParser

FERRY = tool("ferry", quay="string", seats={"type": "array"}, night="boolean")
MOON = tool("moon", day="integer")
ALL = [FERRY, MOON, tool("now")]
FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
CHAT = {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n"}
THOUGHT = {"open": "<think>", "close_pattern": r"</think>\s*"}
REST = {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)\s*|$", "content": "text"}
OBJECTS: dict[str, Any] = {
    **CHAT,
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": REST,
    },
}
"""Calls are JSON objects."""
TAGS: dict[str, Any] = {
    **CHAT,
    "fields": {
        "thinking": THOUGHT,
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": FUNCTION,
        },
        "content": REST,
    },
}
"""Arguments are tags of their own."""
BARE: dict[str, Any] = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": FUNCTION,
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}
"""Keys without quotes, strings between marks."""
CHANNELS: dict[str, Any] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>",
                     "repeats": True, "join": "\n"},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|return|>", "<|end|>"]},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": FUNCTION,
        },
    },
}  # fmt: skip
"""Text outside of all regions is markup."""
LISTS: dict[str, Any] = {
    "start_anchor": "<|BOT|>",
    "fields": {
        "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        "content": {"open": "<|START_TEXT|>", "close": "<|END_TEXT|>"},
        "tool_calls": {
            "open": "<|START_ACTION|>",
            "close": "<|END_ACTION|>",
            "content": "json",
            "transform_each": True,
            "transform": {"function": {"name": "{tool_name}", "arguments": "{parameters}"}},
        },
    },
}
"""Calls are a list of objects with keys of their own."""
LINES: dict[str, Any] = {
    "start_anchor_pattern": r"<bot>\s*",
    "fields": {
        "content": {"content_args": {"strip": False}},
        "tool_calls": {
            "open_pattern": r"\[call (?P<name>[\w.]+)\]",
            "close": "[end]",
            "content": "kv-lines",
            "content_args": {"value_parser": {"name": "json", "args": {"allow_non_json": True}}},
            "transform": {"name": "{name}", "arguments": "{content}"},
        },
    },
}
"""An argument per line."""


def bound(parser: Any, template: dict[str, Any], **more: Any) -> Any:
    """The parser's class for a checkpoint with a response template."""
    with tempfile.TemporaryDirectory() as folder:
        config = {"response_template": template, **more}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
        return parser.for_checkpoint(Path(folder))


class SlowTimes:
    """How long a megabyte takes is looked at at night; the day has a sixteenth in small pieces."""

    @pytest.mark.slow
    def test_a_megabyte_takes_linear_time(self) -> None:
        super().test_a_megabyte_takes_linear_time()  # type: ignore[misc]

    @pytest.mark.slow
    def test_a_piece_costs_the_same_however_much_came_before(self) -> None:
        super().test_a_piece_costs_the_same_however_much_came_before()  # type: ignore[misc]


class Tools(SlowTimes, BlockKit):
    examples = 20
    template: ClassVar[dict[str, Any]]

    @classmethod
    def registered(cls) -> Any:
        if "_class" not in vars(cls):
            cls._class = bound(HfToolParser, cls.template)  # type: ignore[attr-defined]
        return cls._class  # type: ignore[attr-defined]


class Thoughts(SlowTimes, ThoughtKit):
    examples = 20
    template: ClassVar[dict[str, Any]]

    @classmethod
    def registered(cls) -> Any:
        if "_class" not in vars(cls):
            cls._class = bound(HfReasoning, cls.template)  # type: ignore[attr-defined]
        return cls._class  # type: ignore[attr-defined]


FERRY_CALL = (
    "<tool_call>\n<function=ferry>\n<parameter=quay>\n007 é </parameter \U0001f600\n</parameter>\n"
    "<parameter=seats>\n[2, 3]\n</parameter>\n<parameter=night>True</parameter>\n"
    '<parameter=more>{"a": [null]}</parameter><parameter=odd>a "b</parameter>\n'
    "</function>\n</tool_call>"
)
FERRY_ARGUMENTS = {
    "quay": "007 é </parameter \U0001f600",
    "seats": [2, 3],
    "night": True,
    "more": {"a": [None]},
    "odd": 'a "b',
}


class TestTags(Tools):
    name, template = "hf", TAGS
    samples = [
        Sample(
            f"Yes.\n{FERRY_CALL}", content="Yes.", calls=[("ferry", FERRY_ARGUMENTS)], tools=ALL
        ),
        Sample(
            "<tool_call><function=now></function></tool_call>\n"
            "<tool_call><function=moon><parameter=day>3</parameter>x</function></tool_call>Done.",
            content="Done.",
            calls=[("now", {}), ("moon", {"day": 3})],
            tools=ALL,
        ),
        Sample(FERRY_CALL[:-5], content=FERRY_CALL[:-5], tools=ALL),
        Sample("<tool_call>\n<function=>x", content="<tool_call>\n<function=>x"),
    ]


class TestObjects(Tools):
    name, template = "hf", OBJECTS
    samples = [
        Sample(
            'A.\n<tool_call>\n{"name": "moon", "arguments": {"day": "3", "x": "é\\u00e9"}}\n'
            '</tool_call>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
            content="A.",
            calls=[("moon", {"day": 3, "x": "éé"}), ("now", {})],
            tools=ALL,
        ),
        Sample('<tool_call>{"name": "now"}</tool_call>', calls=[("now", {})]),
        Sample(
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            calls=[("f", {"a": 1})],
        ),
        Sample('<tool_call>{"name": 1}</tool_call>', content='<tool_call>{"name": 1}</tool_call>'),
    ]


class TestBare(Tools):
    name, template = "hf", BARE
    samples = [
        Sample(
            '<|tool_call>call:ferry{quay:<|"|>say "7", {b:1}<|"|>,seats:[2,3],o:{night:true}}'
            "<tool_call|><|tool_call>call:now{}<tool_call|>",
            calls=[
                ("ferry", {"quay": 'say "7", {b:1}', "seats": [2, 3], "o": {"night": True}}),
                ("now", {}),
            ],
            tools=ALL,
        ),
        Sample(
            "<|tool_call>call:f{a:b}<tool_call|>", content="<|tool_call>call:f{a:b}<tool_call|>"
        ),
    ]


class TestChannels(Tools):
    name, template = "hf", CHANNELS
    samples = [
        Sample(
            "<|channel|>commentary to=functions.moon <|constrain|>json<|message|>"
            '{"day": 3}<|call|>',
            calls=[("moon", {"day": 3})],
        ),
    ]


class TestLists(Tools):
    name, template = "hf", LISTS
    samples = [
        Sample(
            '<|START_ACTION|>[\n  {"tool_call_id": "0", "tool_name": "moon", "parameters": '
            '{"day": 3}}, {"tool_name": "now", "parameters": {}}]<|END_ACTION|>',
            calls=[("moon", {"day": 3}), ("now", {})],
        ),
        Sample("<|START_ACTION|>[]<|END_ACTION|>", content="<|START_ACTION|>[]<|END_ACTION|>"),
    ]


class TestLines(Tools):
    name, template = "hf", LINES
    samples = [
        Sample(
            " [call ferry]\nquay: 12\nseats: [2]\n\nx\nmore: a: b\n[end] ok",
            content="ok",
            calls=[("ferry", {"quay": "12", "seats": [2], "more": "a: b"})],
            tools=ALL,
        ),
    ]


class TestThoughtBeforeTheRest(Thoughts):
    name, template, reasoning_end = "hf", TAGS, "</think>"
    samples = [
        Sample("<think>\nWe add.\n</think>\n\nIt is 4.", content="It is 4.", reasoning="We add."),
        Sample("<think></think>\nIt is 4.", content="It is 4."),
        Sample("<think>\nLet me </thin", reasoning="Let me </thin"),
        Sample(" It is 4. \n<|im_end|>\n", content="It is 4."),
        Sample(f"<think>Hm</think>{FERRY_CALL}", reasoning="Hm", content=FERRY_CALL),
    ]


class TestThoughtInChannels(Thoughts):
    name, template = "hf", CHANNELS
    samples = [
        Sample(
            "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>"
            "B <|end|><|start|>assistant<|channel|>final<|message|> C\n d <|return|>",
            reasoning="A\nB",
            content="C\n d",
        ),
        Sample("no channel", content="no channel"),
        Sample("x<|channel|>final<|message|>C", content="C"),
    ]


def message(template: dict[str, Any], prefix: str, pieces: list[str], tools: Any) -> ParsedMessage:
    reasoning = make_parser(bound(HfReasoning, template), thinking=True, prompt_end=prefix)
    return fold(run(OutputParser(reasoning, bound(HfToolParser, template)(tools=tools)), pieces))


def random_output(template: dict[str, Any], chance: random.Random) -> tuple[str, str]:
    """The end of a prompt, and a well-formed output."""
    words = ["Yes", "a < b", "{1}", '"q"', "é\U0001f600", "x\ny", "[]", "</", "call:"]

    def text() -> str:
        return " ".join(chance.choice(words) for _ in range(chance.randint(1, 4)))

    def arguments() -> dict[str, Any]:
        values: list[Any] = [
            1,
            -2.5,
            True,
            None,
            text().replace("\n", " "),
            [1, "a"],
            {"b": "c,d:e"},
        ]
        return {key: chance.choice(values) for key in "abc"[: chance.randint(0, 3)]}

    calls = [("f", arguments()), ("g.h" if template is LINES else "g", arguments())]
    calls = calls[: chance.randint(0, 2)]
    thought, answer = chance.choice(["", text()]), chance.choice(["", text()])
    if template is TAGS:
        tagged = [
            (name, "".join(
                f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
                "</parameter>\n" for key, value in values.items()
            )) for name, values in calls
        ]  # fmt: skip
        tail = "".join(
            f"\n<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"
            for name, body in tagged
        )
        opened = chance.random() < 0.5
        head = f"\n{thought}\n</think>\n\n" if opened or thought else ""
        prefix = "<|im_start|>assistant\n" + ("<think>\n" if opened else "")
        return prefix, (
            "" if opened or not head else "<think>"
        ) + head + answer + tail + "<|im_end|>"
    if template is OBJECTS:
        tail = "".join(
            "\n<tool_call>\n" + json.dumps({"name": name, "arguments": values}) + "\n</tool_call>"
            for name, values in calls
        )
        head = f"<think>{thought}</think>\n\n" if thought else ""
        return "<|im_start|>assistant\n", head + answer + tail
    if template is CHANNELS:
        parts = [f"<|channel|>analysis<|message|>{thought}<|end|>"] if thought else []
        parts += [
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            f"{json.dumps(values)}<|call|>" for name, values in calls
        ]  # fmt: skip
        parts += [f"<|channel|>final<|message|>{answer}<|return|>"] if answer else []
        return "<|start|>assistant", "<|start|>assistant".join(parts)
    head = f"<|START_THINKING|>{thought}<|END_THINKING|>"
    listed = [{"tool_name": name, "parameters": values} for name, values in calls]
    tail = f"<|START_ACTION|>{json.dumps(listed)}<|END_ACTION|>" if listed else ""
    return "<|BOT|>", head + f"<|START_TEXT|>{answer}<|END_TEXT|>" + tail


@pytest.mark.parametrize("template", [OBJECTS, TAGS, CHANNELS, LISTS])
def test_well_formed_outputs_read_as_in_transformers(template: dict[str, Any]) -> None:
    chance = random.Random(7)
    for _ in range(60):
        prefix, output = random_output(template, chance)
        expected = parse_response(output, template, prefix=prefix)
        thought = expected.get("thinking", expected.get("reasoning_content"))
        places = [chance.randrange(len(output) + 1) for _ in range(6)]
        found = message(template, prefix, cut(output, places), ())
        assert found.reasoning == thought, output
        assert found.content == expected.get("content"), output
        functions = [call["function"] for call in expected.get("tool_calls", ())]
        assert [call.name for call in found.tool_calls] == [f["name"] for f in functions]
        read = [json.loads(call.arguments) for call in found.tool_calls]
        assert read == [function["arguments"] for function in functions], output


def test_a_call_that_an_answer_quotes_is_no_call() -> None:
    call = "<|channel|>commentary to=functions.f <|message|>{}<|call|>"
    output = f"<|channel|>final<|message|>Write {call}.<|return|>"
    found = message(CHANNELS, "<|start|>assistant", list(output), ())
    assert found == ParsedMessage(content=f"Write {call}.")


def test_arguments_that_are_nested_too_deep_are_content() -> None:
    parser = bound(HfToolParser, OBJECTS)
    for depth in (*range(960, 1000), 100_000):
        nested = "[" * depth + "]" * depth
        call = f'<tool_call>{{"name": "f", "arguments": {{"a": {nested}}}}}</tool_call>'
        found = fold(run(parser(), [call]))
        assert bool(found.tool_calls) is not bool(found.content)


def test_the_prompt_opens_and_closes_the_thought() -> None:
    chat = "<|im_start|>user\n<think></think><|im_end|>\n<|im_start|>assistant\n"
    for end, thought, content in (("<think>\n", "A", "B"), ("<think>\n\n</think>\n\n", None, "C")):
        output = "A</think>B" if thought else "C"
        found = message(TAGS, chat + end, list(output), ())
        assert (found.reasoning, found.content) == (thought, content)
    parser = make_parser(
        bound(HfReasoning, TAGS), thinking=True, prompt_end=chat + "<think></think>"
    )
    assert parser.reasoning_ended


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"version": 2}, "version"),
    ({"more": 1}, "more"),
    ({"defaults": {"role": "assistant", "tone": "calm"}}, "defaults.tone"),
    ({"start_anchor": None}, "start_anchor"),
    ({"start_anchor": [""]}, "start_anchor"),
    ({"fields": {}}, "fields"),
    ({"fields": {"audio": {"open": "<a>"}}}, "fields.audio"),
    ({"fields": {"content": {}, "thinking": {}}}, "fields.thinking.open"),
    ({"fields": {"content": {"content": "json"}}}, "fields.content.content"),
    ({"fields": {"content": {"repeats": True}}}, "fields.content.repeats"),
    ({"fields": {"content": {"repeats": "no"}}}, "fields.content.repeats"),
    ({"fields": {"content": {"content_args": {"strip": "false"}}}},
     "fields.content.content_args.strip"),
    ({"fields": {"tool_calls": {"open": "a", "content": "json",
      "content_args": {"unquoted_keys": "false"}}}}, "fields.tool_calls.args.unquoted_keys"),
    ({"fields": {"tool_calls": {"open": "a", "content": "kv-lines", "content_args": {
        "value_parser": {"name": "text", "args": {"strip": 0}}}}}},
     "fields.tool_calls.content_args.value_parser.args.strip"),
    ({"fields": {"content": {"transform": {}}}}, "fields.content.transform"),
    ({"fields": {"content": {"colour": 1}}}, "fields.content.colour"),
    ({"fields": {"content": {"open": "a", "open_pattern": "b"}}}, "fields.content.open"),
    ({"fields": {"thinking": {"open_pattern": "(?=x)y"}}}, "fields.thinking.open_pattern"),
    ({"fields": {"thinking": {"open_pattern": r"(.)\1"}}}, "fields.thinking.open_pattern"),
    ({"fields": {"thinking": {"open_pattern": r"\s*"}}}, "fields.thinking.open_pattern"),
    ({"fields": {"thinking": {"open_pattern": "(a|b*)*c"}}}, "fields.thinking.open_pattern"),
    ({"fields": {"thinking": {"open_pattern": "a{9999}"}}}, "fields.thinking.open_pattern"),
    ({"fields": {"thinking": {"open": "a", "close_pattern": "^b"}}},
     "fields.thinking.close_pattern"),
    ({"fields": {"thinking": {"open": "a", "close_pattern": "b$"}}},
     "fields.thinking.close_pattern"),
    ({"fields": {"thinking": {"open_pattern": "(" * 3000}}}, "fields.thinking.open_pattern"),
    ({"fields": {"thinking": {"open_pattern": "(" * 99}}}, "fields.thinking.open_pattern"),
    ({"fields": {"tool_calls": {"content": "json"}}}, "fields.tool_calls.open"),
    ({"fields": {"tool_calls": {"open": "a", "content": "int"}}}, "fields.tool_calls.content"),
    ({"fields": {"tool_calls": {"open": "a", "content": "yaml"}}}, "fields.tool_calls"),
    ({"fields": {"tool_calls": {"open": "a", "content": "xml-inline"}}},
     "fields.tool_calls.content_args.tag_pattern"),
    ({"fields": {"tool_calls": {"open": "a", "content": "xml-inline",
      "content_args": {"tag_pattern": "(?P<key>a)"}}}},
     "fields.tool_calls.content_args.tag_pattern"),
    ({"fields": {"tool_calls": {"open": "a", "content": "json",
      "transform": {"function": {"name": "{who}", "arguments": "{content}"}}}}},
     "fields.tool_calls.transform"),
    ({"fields": {"tool_calls": {"open": "a", "content": "json",
      "transform": {"function": {"name": "f {content}"}}}}}, "fields.tool_calls.transform"),
    ({"fields": {"tool_calls": {"open": "a", "content": "json",
      "transform": {"function": {"arguments": "{content}"}}}}}, "fields.tool_calls.transform"),
    ({"fields": {"tool_calls": {"open_pattern": "(?P<name>a)", "content": "json"}}},
     "fields.tool_calls.transform"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "field"), REFUSED, ids=lambda value: str(value)[:48])
def test_what_cannot_be_served_is_refused_with_its_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=rf"^response_template\.{field}(\.|:)"):
        read_template({**CHAT, "fields": {"content": {}}, **change})


def test_a_checkpoint_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no response_template"):
        HfReasoning.for_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"response_schema": {}}')
    with pytest.raises(ValueError, match="older form"):
        HfToolParser.for_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="tool_calls: is missing"):
        bound(HfToolParser, {**CHAT, "fields": {"content": {}}})


def test_an_answer_may_begin_with_its_reasoning_unless_it_is_told_not_to() -> None:
    parser = bound(HfReasoning, TAGS)
    assert not parser().reasoning_ended
    assert parser(thinking=False).reasoning_ended


@pytest.mark.parametrize("more", [0, 1])
def test_text_before_the_first_region_is_dropped_up_to_its_limit(more: int) -> None:
    fields = {"thinking": {"open": "<think>", "close": "</think>"}}
    parser = bound(HfReasoning, {**CHAT, "fields": fields})()
    lead = "x" * (MAX_LEAD + more)
    assert parser.feed(lead) == ([Content(lead)] if more else [])
    assert parser.feed("<think>so</think>")[0] == Reasoning("so")
