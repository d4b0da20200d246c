"""The kit that every tool parser in the box passes, and arguments that its samples share."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest

from jackfield.core.output_parsing.output_parser import fold
from jackfield.core.protocols.parsers import ToolCallEnd
from jackfield.plugins.conformance.parsers import ToolParserKit, run, tool

PARIS = {"city": "Paris"}
TRICKY = {"text": 'a "quoted" } ] brace\n\\ and </tool_call> \u00e9\u4e2d\U0001f600', "n": -1.5e3}
NESTED = {"filter": {"and": [{"a": [1, [2, {}]]}, None, True]}, "empty": {}}
TRICKY_JSON = (
    '{"text": "a \\"quoted\\" } ] brace\\n\\\\ and </tool_call> \\u00e9\u4e2d\\ud83d\\ude00", '
    '"n": -1.5e3}'
)
NESTED_JSON = '{"filter": {"and": [{"a": [1, [2, {}]]}, null, true]}, "empty": {}}'
PARIS_JSON = '{"city": "Paris"}'
FERRY = tool("ferry", quay="string", seats={"type": "array"}, night="boolean")
MOON = tool("moon", day="integer", phase={"type": ["string", "null"]})
ALL = [FERRY, MOON, tool("now")]
"""Tools of several dialects' samples."""
WEATHER = tool("get_weather", city="string", days="integer", hourly="boolean")


class Kit(ToolParserKit):
    """What the kit asks of everybody, and what the box asks of itself."""

    examples = 30
    close: ClassVar[str] = ""
    """What ends a call of JSON arguments in a dialect that closes its calls."""

    def test_arguments_stream_before_they_are_complete(self) -> None:
        opening = self.opening()
        events = run(self.make(self.samples[0]), [opening])
        assert opening and not any(isinstance(event, ToolCallEnd) for event in events)

    def test_a_call_that_breaks_off_shows_no_mark(self) -> None:
        """Wherever in its arguments: it has no end, and neither text nor arguments show markup."""
        if not self.close:
            pytest.skip("nothing closes a call")
        opening = self.opening()
        text = next(sample.text for sample in self.samples if sample.text.startswith(opening))
        sample = next(item for item in self.samples if item.text == text)
        calls = fold(run(self.make(sample), [text])).tool_calls
        arguments = calls[0].arguments
        for end in range(len(opening), len(opening) + len(arguments) - 1):
            for after in (self.close, f"{self.close}\nDone.", self.close + text):
                events = run(self.make(sample), [text[:end] + after])
                message = fold(events)
                first = message.tool_calls[0].arguments
                assert arguments.startswith(first), (first, end, after)
                shown = (message.content or "") + first
                assert not [mark for mark in self.marks() if mark in shown], (shown, end, after)
                if self.close + text == after:
                    assert message.tool_calls[1:] == calls, (end, message)
                elif self.close != after:
                    assert message.content == "Done.", (end, message)


class BlockKit(Kit):
    """For dialects whose blocks mean something only as a whole."""

    def test_arguments_stream_before_they_are_complete(self) -> None:
        """They do not: a call that has begun is complete."""
        for sample in self.samples:
            parser = self.make(sample)
            if any(isinstance(arguments, str) for _, arguments in sample.calls):
                continue  # Cut off.
            for character in sample.text:
                calls = fold(parser.feed(character)).tool_calls
                assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
