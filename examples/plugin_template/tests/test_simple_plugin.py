"""The plugin's own tests: `python -m pytest` in this folder, with the plugin installed."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import simple_plugin
from simple_plugin.policy import ShortestPrompt
from simple_plugin.tool_parser import SimpleTagsParser

from jackfield.core.protocols import ParserEvent
from jackfield.core.registry import load_plugins
from jackfield.core.text.parsing import ParsedMessage, ParsedToolCall, fold

ANSWER = 'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> Done < 5.'
MESSAGE = ParsedMessage(
    content="Let me see.  Done < 5.", tool_calls=[ParsedToolCall("add", '{"a": 1}')]
)


def parse(pieces: list[str]) -> ParsedMessage:
    parser = SimpleTagsParser()
    events: list[ParserEvent] = []
    for piece in pieces:
        events += parser.feed(piece)
    return fold(events + parser.finish())


def test_a_call_is_taken_out_of_the_text() -> None:
    assert parse([ANSWER]) == MESSAGE


def test_any_cutting_gives_the_same_message() -> None:
    rng = random.Random(0)
    assert parse(list(ANSWER)) == MESSAGE
    for _ in range(200):
        places = sorted(rng.sample(range(len(ANSWER)), 6))
        cuts = [0, *places, len(ANSWER)]
        assert parse([ANSWER[a:b] for a, b in itertools.pairwise(cuts)]) == MESSAGE


def test_what_is_no_call_stays_text() -> None:
    for text in (
        "<tool_call>no JSON</tool_call>",
        '<tool_call>["name"]</tool_call>',
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "<tool_call>{",
        "</tool_call> <",
    ):
        assert parse([text]) == ParsedMessage(content=text)


def test_short_prompts_go_first() -> None:
    long = SimpleNamespace(num_prompt_tokens=9, arrival=1.0)
    short = SimpleNamespace(num_prompt_tokens=2, arrival=2.0)
    late = SimpleNamespace(num_prompt_tokens=2, arrival=3.0)
    assert sorted([long, late, short], key=ShortestPrompt().key) == [short, late, long]


def test_both_names_are_registered_and_load() -> None:
    installed = "simple_tags" in load_plugins()["tool_parser"]
    plugins = load_plugins(extra=[] if installed else [simple_plugin])
    assert plugins["tool_parser"].load("simple_tags") is SimpleTagsParser
    assert plugins["schedule_policy"].load("shortest_prompt") is ShortestPrompt
