"""A tool parser: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, handed on whole.

Jackfield's own `hermes` parser streams the arguments and mends slips. This one waits for the
closing tag, so it fits on a page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jackfield.core.protocols import (
    Content,
    ParserEvent,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAGS = re.compile(f"({OPEN}|{CLOSE})")
BEGINNINGS = {tag[:length] for tag in (OPEN, CLOSE) for length in range(1, len(tag))}


class SimpleTagsParser:
    """One instance a request. Any way to cut the text into pieces gives the same message."""

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._held = ""
        """The end of the text so far, where it may be the beginning of a tag."""
        self._inside = False
        self._call: list[str] = []
        """Text since the opening tag."""
        self._count = 0

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        """Events of the next piece of text."""
        text, self._held = cut(self._held + text)
        events: list[ParserEvent] = []
        for piece in TAGS.split(text):
            if piece == (CLOSE if self._inside else OPEN):
                if self._inside:
                    events += self._end_of_call()
                self._inside = not self._inside
            elif self._inside:
                self._call.append(piece)
            elif piece:
                events.append(Content(piece))
        return events

    def finish(self) -> list[ParserEvent]:
        """The text is over: what was held back is content."""
        rest = self._held
        if self._inside:
            rest = OPEN + "".join(self._call) + rest
        return [Content(rest)] if rest else []

    def _end_of_call(self) -> list[ParserEvent]:
        source, self._call = "".join(self._call), []
        call = read_call(source)
        if call is None:
            return [Content(OPEN + source + CLOSE)]
        name, arguments = call
        index, self._count = self._count, self._count + 1
        return [
            ToolCallStart(index, name),
            ToolCallArguments(index, arguments),
            ToolCallEnd(index),
        ]


def read_call(source: str) -> tuple[str, str] | None:
    """→ (name, arguments as JSON), or None where it is no call. A parser never raises on text."""
    try:
        call = json.loads(source)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return call["name"], json.dumps(arguments, ensure_ascii=False)


def cut(text: str) -> tuple[str, str]:
    """→ (text up to there, a tail that may be the beginning of a tag)"""
    start = text.rfind("<", max(0, len(text) - len(CLOSE) + 1))
    if start >= 0 and text[start:] in BEGINNINGS:
        return text[:start], text[start:]
    return text, ""
