"""Both parsers pass Jackfield's kit, and understand each other."""

from __future__ import annotations

from jackfield.core.registry import load_plugins
from jackfield.core.text.parsing import OutputParser, ParsedToolCall, fold
from jackfield.plugins.conformance.parsers import (
    ReasoningParserKit,
    Sample,
    ToolParserKit,
    tool,
)

WEATHER = tool("weather", city="string", days="integer")


class TestTools(ToolParserKit):
    name = "brackets"
    samples = [
        Sample(
            '[[weather city="Paris" days=3]]', calls=[("weather", {"city": "Paris", "days": 3})]
        ),
        Sample(
            'Let me look. [[weather city="S\\u00e3o [[Paulo]]"]]\n[[now]] One moment.',
            content="Let me look. \n One moment.",
            calls=[("weather", {"city": "São [[Paulo]]"}), ("now", {})],
        ),
        Sample(
            '[[plan\n  stops=["a", {"b": [1, 2]}]\n  fast=true\n]]',
            calls=[("plan", {"stops": ["a", {"b": [1, 2]}], "fast": True})],
        ),
        Sample('[[weather city="Par', calls=[("weather", '{"city": "Par')]),
        Sample('[[weather city="Paris" days=', calls=[("weather", '{"city": "Paris", "days": ')]),
        Sample("A [[page]], [[ ]] and [x].", content="A [[page]], [[ ]] and [x].", tools=[WEATHER]),
        Sample(
            "See [[page]]: [[weather days=1]]",
            content="See [[page]]:",
            calls=[("weather", {"days": 1})],
            tools=[WEATHER],
        ),
        Sample("[[weather city=Paris]]", content="Paris]]", calls=[("weather", '{"city": ')]),
    ]


class TestReasoning(ReasoningParserKit):
    name = "brackets"
    reasoning_end = "[[/thinking]]"
    samples = [
        Sample(
            "[[thinking]]\nIs it [[warm]]?\n[[/thinking]]\nIt is warm.",
            reasoning="Is it [[warm]]?",
            content="It is warm.",
        ),
        Sample("It is [[thinking]] warm.", content="It is [[thinking]] warm."),
        Sample("[[thinking]]Is it", reasoning="Is it"),
        Sample("[[thinking", content="[[thinking", thinking=False),
    ]


def test_calls_are_looked_for_in_the_answer_alone() -> None:
    plugins = load_plugins()
    chain = OutputParser(
        plugins["reasoning_parser"].load("brackets")(), plugins["tool_parser"].load("brackets")()
    )
    text = "[[thinking]]Say [[now]].[[/thinking]][[now]]"
    message = fold([e for char in text for e in chain.feed(char)] + chain.finish())
    assert message.reasoning == "Say [[now]]."
    assert message.tool_calls == [ParsedToolCall("now", "{}")]
