"""Tool calls as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.protocols import (
    Content,
    ParserEvent,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from .json_scanner import JsonScanner

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MAX_JUNK = 64
"""Characters between a call's JSON and its closing tag that are taken for a slip and dropped."""
_SPACE = " \t\r\n"
_SPACES = re.compile("[ \t\r\n]+")


class HermesToolParser:
    """Finds tool calls in the answer.

    Each rule looks only at the text so far, so every cutting of the text gives the same fold:

    - A call starts when its name is known and its arguments' `{` (or the object's end, for a call
      without arguments) is reached; keys may come in either order. The arguments are the source
      text of the object, handed on as it arrives.
    - A call that goes wrong before it starts is content, tag included. One that goes wrong after
      ends where it broke, and the rest is content. One that the end of the text cuts off has
      started, and has no end.
    - A missing closing tag is tolerated; up to 64 characters between JSON and tag are dropped.
    - Whitespace next to calls is content only where it stands between two other contents.
    """

    call_form = (_OPEN, _OPEN + '\n{"name": "{name}", "arguments": ', "}\n" + _CLOSE)

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._state: Callable[[], bool] = self._text
        self._buffer = ""
        self._at = 0
        """Where the undecided text begins in `_buffer`."""
        self._events: list[ParserEvent] = []
        self._calls = 0
        self._said = False
        """Whether content was passed on."""
        self._spaces: list[str] = []
        """Whitespace that may yet stand between contents."""
        self._gap: list[str] = []
        """Whitespace after a call's JSON, while its closing tag may follow."""
        self._call: _Call | None = None

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]:
        """Events of the next piece of text."""
        self._events = []
        self._buffer = self._buffer[self._at :] + text
        self._at = 0
        while self._at < len(self._buffer) and self._state():
            pass
        return self._events

    def finish(self) -> list[ParserEvent]:
        """The text is over: what was held back and is no call is content."""
        self._events = []
        if self._call is not None and not self._call.started:
            self._say("".join(self._call.source))
        self._spaces += self._gap
        self._say(self._buffer[self._at :])
        if not self._calls and (self._call is None or not self._call.started):
            self._pass_on(self._spaces)
        self._buffer, self._at, self._spaces, self._gap, self._call = "", 0, [], [], None
        return self._events

    # Each state moves `_at` over what it can decide; True: go on with the rest.

    def _text(self) -> bool:
        """Outside calls."""
        start = self._buffer.find(_OPEN, self._at)
        if start < 0:
            safe = _cut_tag(self._buffer, self._at)
            self._say(self._buffer[self._at : safe])
            self._at = safe
            return False
        self._say(self._buffer[self._at : start])
        self._at = start + len(_OPEN)
        self._call = _Call(self._calls)
        self._state = self._object
        return True

    def _object(self) -> bool:
        """Inside a call's JSON."""
        call = self._call
        assert call is not None
        self._at, status = call.feed(self._buffer, self._at, self._events)
        if status == "more":
            return False
        self._call = None
        if not call.started:
            self._say("".join(call.source))
            self._state = self._text
            return True
        self._calls += 1
        self._events.append(ToolCallEnd(call.index))
        self._state = self._closing
        return True

    def _closing(self) -> bool:
        """Between a call's JSON and its closing tag."""
        spaces = _SPACES.match(self._buffer, self._at)
        if spaces is not None:
            self._gap.append(spaces[0])
            self._at = spaces.end()
        end = self._buffer.find(_CLOSE, self._at, self._at + _MAX_JUNK + len(_CLOSE))
        opening = self._buffer.find(_OPEN, self._at, self._at + _MAX_JUNK + len(_OPEN))
        if end >= 0 and not 0 <= opening < end:
            self._at = end + len(_CLOSE)
        elif opening < 0 and len(self._buffer) - self._at < _MAX_JUNK + len(_CLOSE):
            return False
        else:
            self._spaces += self._gap
        self._gap = []
        self._state = self._text
        return True

    def _say(self, text: str) -> None:
        """Pass content on, whitespace next to calls only once it stands between contents."""
        if not text:
            return
        bare = text.strip(_SPACE)
        if not bare:
            self._spaces.append(text)
            return
        begin = len(text) - len(text.lstrip(_SPACE))
        if self._said or not self._calls:
            self._pass_on([*self._spaces, text[: begin + len(bare)]])
        else:
            self._pass_on([bare])
        self._said = True
        self._spaces = [text[begin + len(bare) :]]

    def _pass_on(self, parts: Sequence[str]) -> None:
        text = "".join(parts)
        if text:
            self._events.append(Content(text))


class _Call:
    """One call's JSON object, key by key. Fed text is consumed up to what it can decide."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.started = False
        self.source: list[str] = [_OPEN]
        """All consumed text, until the call has started."""
        self._name = ""
        self._arguments: list[str] | None = None
        """Source text of arguments that came before the name."""
        self._keys: set[str] = set()
        self._place = "open"
        self._scanner = JsonScanner()
        self._token: list[str] = []
        self._key = ""

    def feed(self, text: str, position: int, events: list[ParserEvent]) -> tuple[int, str]:
        """Consume `text` from `position` → (where it stopped, "more", "done" or "bad")."""
        status = "more"
        while position < len(text) and status == "more":
            if self._place == "scalar":
                position, status = self._value(text, position, events)
                continue
            char = text[position]
            if char not in _SPACE:
                status = self._punctuation(char, events)
                if status == "bad":
                    break
                if self._place == "scalar":
                    continue
            position += 1
            self._keep(char)
        return position, status

    def _keep(self, text: str) -> None:
        if not self.started:
            self.source.append(text)

    def _punctuation(self, char: str, events: list[ParserEvent]) -> str:
        """A character between keys and values."""
        place = self._place
        if place == "open" and char == "{":
            self._place = "firstkey"
        elif place in ("key", "firstkey") and char == '"':
            self._begin_value("")
        elif place == "colon" and char == ":":
            self._place = "value"
        elif place == "value" and (self._key != "arguments" or char == "{"):
            if self._key == "name" and char != '"':
                return "bad"
            key = self._key
            self._begin_value(key)
            if key == "arguments" and self._name:
                self._start(events)
        elif place == "comma" and char == ",":
            self._place = "key"
        elif place in ("comma", "firstkey") and char == "}":
            return self._end(events)
        else:
            return "bad"
        return "more"

    def _begin_value(self, key: str) -> None:
        self._key, self._place = key, "scalar"
        self._scanner, self._token = JsonScanner(), []

    def _value(self, text: str, position: int, events: list[ParserEvent]) -> tuple[int, str]:
        """Inside a key ("" in `_key`) or a value."""
        status, end = self._scanner.scan(text, position)
        piece = text[position:end]
        self._keep(piece)
        if self._key == "arguments" and self.started:
            if piece:
                events.append(ToolCallArguments(self.index, piece))
        elif self._key in ("", "name", "arguments"):
            self._token.append(piece)
        if status != "done":
            return end, status
        key = self._key
        if key == "arguments":
            self._place = "comma"
            if not self.started:
                self._arguments = self._token
            return end, "more"
        if key in ("", "name"):
            value = _string("".join(self._token))
            if not value or (key == "" and value in self._keys):
                return end, "bad"
            if key == "":
                self._keys.add(value)
                self._key, self._place = value, "colon"
                return end, "more"
            self._name = value
            if self._arguments is not None:
                self._start(events)
                events.append(ToolCallArguments(self.index, "".join(self._arguments)))
        self._place = "comma"
        return end, "more"

    def _start(self, events: list[ParserEvent]) -> None:
        self.started = True
        self.source = []
        events.append(ToolCallStart(self.index, self._name))

    def _end(self, events: list[ParserEvent]) -> str:
        """The object's closing brace."""
        if not self._name:
            return "bad"
        if not self.started:
            self._start(events)
            events.append(ToolCallArguments(self.index, "{}"))
        return "done"


def _string(source: str) -> str | None:
    """The value of a JSON string; None where it is none (a raw lone surrogate escape is kept)."""
    try:
        value = json.loads(source, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _cut_tag(text: str, begin: int) -> int:
    """Where, from `begin`, a tail begins that may become an opening tag; len(text) if nowhere."""
    start = text.rfind("<", max(begin, len(text) - len(_OPEN) + 1))
    return start if start >= 0 and _OPEN.startswith(text[start:]) else len(text)
