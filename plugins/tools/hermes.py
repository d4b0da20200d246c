"""Hermes tool calls: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Rules, the same for any cutting of the text:
- A call starts once its name is known and its arguments begin; arguments pass on as they stand in
  the text, character by character. So `"name"` before `"arguments"` streams; the other way round,
  the call comes whole when its object closes.
- A call that has started stays a call, even when the text ends in the middle of it.
- What never becomes a call (no name, not an object) is given back as content, markers included.
- Text outside calls is content; white space between calls is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.protocols import (
    Content,
    ParserEvent,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from ...core.text.json_scan import JsonScanner
from ...core.text.markers import partial_suffix

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesToolParser:
    """One request's parser."""

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._text = ""
        """Outside calls: what is not decided yet."""
        self._call: _Call | None = None
        self._count = 0

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        """→ Content and tool-call events."""
        events: list[ParserEvent] = []
        while text or self._text:
            if self._call is not None:
                text = self._in_call(text, events)
                if not text:
                    break
                continue
            self._text, text = self._text + text, ""
            begin = self._text.find(OPEN)
            if begin < 0:
                self._release(partial_suffix(self._text, (OPEN,)), events)
                break
            text = self._text[begin + len(OPEN) :]
            self._text = self._text[:begin]
            self._flush(events, between=True)
            self._call = _Call(self._count)
        return events

    def finish(self) -> list[ParserEvent]:
        """→ what was held back."""
        events: list[ParserEvent] = []
        if self._call is not None:
            if not self._call.started:
                events.append(Content(OPEN + self._call.raw))
            self._call.close(events)
            self._call = None
        self._flush(events, between=self._count > 0)
        return events

    def _in_call(self, text: str, events: list[ParserEvent]) -> str:
        """Feed the open call; → the text after it, empty while it is open."""
        call = self._call
        assert call is not None
        rest = call.feed(text, events)
        if rest is None:
            return ""
        if call.started:
            self._count += 1
        else:
            events.append(Content(OPEN + call.raw))
        self._call = None
        return rest

    def _release(self, held: int, events: list[ParserEvent]) -> None:
        """Give out text that can no longer begin a marker; white space waits for what follows."""
        cut = len(self._text) - held
        ready = self._text[:cut].rstrip()
        if ready:
            events.append(Content(ready))
            self._text = self._text[len(ready) :]

    def _flush(self, events: list[ParserEvent], *, between: bool) -> None:
        """Text before a call, or at the end."""
        text, self._text = self._text, ""
        if text.strip() or (text and not between):
            events.append(Content(text.rstrip() if between else text))


class _Call:
    """The text of one call, from after its opening marker."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.raw = ""
        self.started = False
        self._scan = JsonScanner()
        self._parts: list[str] = []
        self._position = 0
        self._string_start = -1
        self._key: str | None = None
        self._expects_value = False
        self._name: str | None = None
        self._arguments: tuple[int, int | None] | None = None
        """Where the arguments' text begins and ends in `raw`, once known."""
        self._sent = 0
        self._object = False
        """The call's object has begun."""
        self._waiting = False
        """The text ends in what may become the closing marker."""

    def feed(self, text: str, events: list[ParserEvent]) -> str | None:
        """→ None while the call is open, else the text after it."""
        self.raw += text
        while self._position < len(self.raw):
            if self._scan.done or not self._object:
                stop = self._outside()
                if stop is not None:
                    self._send(events, final=True)
                    rest = self.raw[stop:]
                    self.raw = self.raw[:stop]
                    return rest
                if self._waiting:
                    break
                continue
            self._inside()
        self._send(events, final=False)
        return None

    def close(self, events: list[ParserEvent]) -> None:
        """The output ends here: a call whose object is complete lacks only its marker."""
        if self.started and self._scan.done:
            self._send(events, final=True)

    def _outside(self) -> int | None:
        """Before the object, or after it: white space and the closing marker. → where the call
        ends, or None."""
        self._waiting = False
        tail = self.raw[self._position :]
        stripped = tail.lstrip()
        if not stripped:
            self._position = len(self.raw)
            return None
        begin = len(self.raw) - len(stripped)
        if stripped.startswith(CLOSE):
            return begin + len(CLOSE)
        if CLOSE.startswith(stripped):
            self._position, self._waiting = begin, True
            return None
        if not self._object and stripped[0] == "{":
            self._object = True
            self._position = begin
            return None
        return begin

    def _inside(self) -> None:
        """One character of the object."""
        place, character = self._position, self.raw[self._position]
        was_string = self._scan.in_string
        depth = self._scan.depth
        self._scan.feed(character)
        self._position += 1
        if depth == 1 and self._scan.in_string and not was_string:
            self._string_start = place
            if self._expects_value and self._key == "arguments":
                self._arguments = (place, None)
        elif depth == 1 and was_string and not self._scan.in_string:
            self._string_ended(place)
        elif depth == 1 and not was_string:
            self._between(place, character)
        elif depth == 2 and self._scan.depth == 1 and self._open_arguments():
            assert self._arguments is not None
            self._arguments = (self._arguments[0], place + 1)

    def _string_ended(self, place: int) -> None:
        try:
            value = json.loads(self.raw[self._string_start : place + 1], strict=False)
        except ValueError:
            value = self.raw[self._string_start + 1 : place]
        if not self._expects_value:
            self._key = value
        elif self._key == "name" and self._name is None:
            self._name = value
        elif self._key == "arguments" and self._open_arguments():
            self._arguments = (self._string_start, place + 1)

    def _between(self, place: int, character: str) -> None:
        if character == ":":
            self._expects_value = True
        elif character == "," or character == "}":
            self._expects_value = False
        elif character == "{" and self._expects_value and self._key == "arguments":
            if self._arguments is None:
                self._arguments = (place, None)

    def _open_arguments(self) -> bool:
        return self._arguments is not None and self._arguments[1] is None

    def _send(self, events: list[ParserEvent], *, final: bool) -> None:
        """Pass on what is certain."""
        if not self.started and self._name:
            if self._arguments is None and not (self._scan.done and self._object):
                return
            self.started = True
            events.append(ToolCallStart(self.index, self._name))
            self._sent = self._arguments[0] if self._arguments else 0
        if not self.started:
            return
        if self._arguments is not None:
            end = self._arguments[1]
            upto = self._position if end is None else end
            if upto > self._sent:
                events.append(ToolCallArguments(self.index, self.raw[self._sent : upto]))
                self._sent = upto
        if final:
            if self._arguments is None:
                events.append(ToolCallArguments(self.index, "{}"))
            events.append(ToolCallEnd(self.index))
