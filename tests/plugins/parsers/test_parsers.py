"""Reasoning and tool parsers: any cutting gives the same fold, nothing raises, time is linear."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.core.text.parsing import OutputParser, ParsedMessage, fold
from jackfield.plugins.reasoning.think_tags import Qwen3Reasoning
from jackfield.plugins.tools.hermes import HermesToolParser

FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "{", "}", "[", "]", '"', "\\", ":", ",",
    '"name"', '"arguments"', '{"name": "f", "arguments": {"x": 1}}', '{"name": "g"}', " ", "\n",
    "<", "</", "tool", "é", "😀", "\\u00e9", '"a}b"', "null", "-1.5", "text",
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), max_size=24).map(
    "".join
)


def parser(kind: str) -> OutputParser:
    reasoning = Qwen3Reasoning() if kind in ("reasoning", "both") else None
    tools = HermesToolParser() if kind in ("tools", "both") else None
    return OutputParser(reasoning, tools)


def parse(kind: str, pieces: list[str]) -> ParsedMessage:
    one = parser(kind)
    events = [event for piece in pieces for event in one.feed(piece)]
    return fold(events + one.finish())


@pytest.mark.parametrize("kind", ["reasoning", "tools", "both"])
@settings(max_examples=250, deadline=None)
@given(text=TEXTS, data=st.data())
def test_any_cutting_gives_the_same_fold(kind: str, text: str, data: Any) -> None:
    whole = parse(kind, [text])
    assert parse(kind, list(text)) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert parse(kind, pieces) == whole


@pytest.mark.parametrize("unit", ["{", "[", '{"a":', "<tool_call>", "<think>", '<tool_call>{"'])
def test_a_megabyte_of_nesting_takes_under_a_second(unit: str) -> None:
    text = "<tool_call>" + unit * (1_000_000 // len(unit))
    began = time.perf_counter()
    parse("both", [text[i : i + 4096] for i in range(0, len(text), 4096)])
    assert time.perf_counter() - began < 5.0, "quadratic time would be minutes"


CALLS = [
    ('<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n</tool_call>', None,
     [("f", {"city": "Paris"})]),
    ('Let me see.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', "Let me see.",
     [("f", {})]),
    ('<tool_call>{"arguments": {"a": [1, {"b": "}"}]}, "name": "f"}</tool_call>', None,
     [("f", {"a": [1, {"b": "}"}]})]),
    ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g", "arguments": {"x": 1}}'
     "</tool_call>", None, [("f", {}), ("g", {"x": 1})]),
    ('<tool_call>{"name": "f", "arguments": {"t": "caf\\u00e9 \\"q\\""}}</tool_call> done', " done",
     [("f", {"t": 'café "q"'})]),
    ('<tool_call>{"name": "f", "arguments": {"x": 1}}', None, [("f", {"x": 1})]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), CALLS)
def test_hermes_calls(text: str, content: str | None, calls: list[Any]) -> None:
    message = parse("tools", [text])
    assert message.content == content
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == calls


@pytest.mark.parametrize(
    "text", ["<tool_call>hello</tool_call>", '<tool_call>{"a": 1}</tool_call>', "<tool_call>", "a<"]
)
def test_what_is_no_call_comes_back_as_content(text: str) -> None:
    message = parse("tools", [text])
    assert (message.content, message.tool_calls) == (text, [])


def test_call_cut_off_keeps_what_came() -> None:
    message = parse("tools", ['<tool_call>{"name": "f", "arguments": {"city": "Par'])
    assert [(c.name, c.arguments) for c in message.tool_calls] == [("f", '{"city": "Par')]


def test_arguments_stream_as_they_come() -> None:
    one = HermesToolParser()
    one.feed('<tool_call>{"name": "f", "arguments": {"city": ')
    assert [e.fragment for e in one.feed('"Lis')] == ['"Lis']


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nfirst\n</think>\n\nanswer", "\nfirst\n", "answer"),
        ("answer only", None, "answer only"),
        ("<think>never ends", "never ends", None),
        ("\n<think></think>x", None, "x"),
        ("a <think>b</think>", None, "a <think>b</think>"),
    ],
)
def test_think_tags(text: str, reasoning: str | None, content: str | None) -> None:
    message = parse("reasoning", [text])
    assert (message.reasoning, message.content) == (reasoning, content)
