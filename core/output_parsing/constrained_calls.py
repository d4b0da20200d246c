"""Tool parsers for outputs in JSON forms that a grammar enforces: only calls, or calls or a
text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..protocols.parsers import (
    Content,
    ParserEvent,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
)

_SPACE = " \t\r\n"
_JSON = re.compile(r'\s*(?:\Z|[{"\-0-9tfn]|\[\s*(?:\Z|[\]\[{"\-0-9tfn]))')
"""Begins like JSON."""


class NamedCall:
    """Reads an output that is one call's arguments."""

    reads_plain_text = True

    def __init__(self, name: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        if not text:
            return []
        events: list[ParserEvent] = [ToolCallArguments(0, text)]
        if not self._started:
            self._started = True
            events.insert(0, ToolCallStart(0, self._name))
        return events

    def finish(self) -> list[ParserEvent]:
        return [ToolCallEnd(0)] if self._started else []


class CallList:
    """Reads `[{"name": …, "parameters": …}, …]`, name first, as its grammar enforces.

    A call starts once its name is complete; `parameters`' source is its arguments.
    """

    reads_plain_text = True

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._calls = 0
        self._depth = 0
        """Open brackets: 1 in the list, 2 in a call, more in its parameters."""
        self._quoted = False
        self._escaped = False
        self._key = ""
        """Key whose value is being read, or ""."""
        self._string: list[str] = []
        """A string being read at depth 2: a key, or the name."""
        self._started = False

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        events: list[ParserEvent] = []
        arguments: list[str] = []
        for char in text:
            if self._in_arguments and self._is_argument(char):
                arguments.append(char)
            elif arguments:
                events.append(ToolCallArguments(self._calls, "".join(arguments)))
                arguments = []
            self._step(char, events)
        if arguments:
            events.append(ToolCallArguments(self._calls, "".join(arguments)))
        return events

    def finish(self) -> list[ParserEvent]:
        """End the text; a call cut off gets no end event."""
        return []

    @property
    def _in_arguments(self) -> bool:
        return self._key == "parameters" and self._depth >= 2

    def _is_argument(self, char: str) -> bool:
        """Return whether a character belongs to `parameters`' value."""
        if self._depth > 2 or self._quoted:
            return True
        return char not in _SPACE and char not in ",}:"

    def _step(self, char: str, events: list[ParserEvent]) -> None:
        if self._quoted:
            self._string.append(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = False
                self._string_read(events)
        elif char == '"':
            self._quoted = True
            self._string = [char]
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 1 and self._started:
                events.append(ToolCallEnd(self._calls))
                self._calls += 1
                self._started, self._key = False, ""
        elif char == "," and self._depth == 2:
            self._key = ""

    def _string_read(self, events: list[ParserEvent]) -> None:
        if self._depth != 2:
            return
        read = json.loads("".join(self._string), strict=False)
        if not self._key:
            self._key = read
        elif self._key == "name" and not self._started:
            self._started = True
            events.append(ToolCallStart(self._calls, read))


class CallsOrText:
    """Reads an output of calls, which begin with a known text, or JSON content."""

    reads_plain_text = True

    def __init__(self, parser: Callable[[], ToolParser], opens: Sequence[str]) -> None:
        self._make = parser
        self._opens = tuple(opens)
        self._parser: ToolParser | None = None
        self._undecided: str | None = ""
        """The text while undecided, then None."""
        self._is_markup = False
        """Whether calls begin unlike JSON, so that none of them is content."""

    @staticmethod
    def of(parser: Any, opens: Sequence[str]) -> Callable[..., CallsOrText]:
        """Return a subclass with a tool parser class's attributes."""

        class Subclass(CallsOrText):
            markers = getattr(parser, "markers", ())
            new_id = getattr(parser, "new_id", None)

            def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
                super().__init__(lambda: parser(tools=tools), opens)

        if Subclass.new_id is None:
            del Subclass.new_id
        return Subclass

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        if self._undecided is not None:
            text, self._undecided = self._undecided + text, None
            if text.startswith(self._opens):
                self._parser = self._make()
                self._is_markup = _JSON.match(text) is None
            elif any(opened.startswith(text) for opened in self._opens):
                self._undecided = text
                return []
        if self._parser is not None:
            return self._calls(self._parser.feed(text))
        return [Content(text)] if text else []

    def finish(self) -> list[ParserEvent]:
        if self._parser is not None:
            return self._calls(self._parser.finish())
        text, self._undecided = self._undecided, None
        return [Content(text)] if text else []

    def _calls(self, events: list[ParserEvent]) -> list[ParserEvent]:
        """Drop the markup of a call cut off before its name."""
        if not self._is_markup:
            return events
        return [event for event in events if not isinstance(event, Content)]
