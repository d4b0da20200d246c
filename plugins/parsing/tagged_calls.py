"""Tool calls with one tag per argument, as plain text: the XML-like dialects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .cursor import SPACES, Marks, Read
from .schema_values import json_of, parameter_types
from .tool_machine import ToolMachine

_MAX_HEADER = 256
"""Characters at most of a call's or an argument's name; longer text is not a name."""


class TaggedCallsParser(ToolMachine):
    """A call is open, name, name_end, then for each argument parameter, key, key_end, value_open,
    value, value_end; then close. `around` are marks around calls, which are dropped.

    The tools' schemas determine the type of a value. Strings are handed on as they arrive.
    """

    around: ClassVar[tuple[str, ...]] = ()
    lead: ClassVar[str] = ""
    """A mark before a call; text between it and the call is dropped with it."""
    open: ClassVar[str]
    name_end: ClassVar[tuple[str, ...]] = (">",)
    parameter: ClassVar[str]
    key_end: ClassVar[str] = ">"
    value_open: ClassVar[str] = ""
    """May be missing."""
    value_end: ClassVar[tuple[str, ...]]
    """Texts that end a value; `parameter` or `close` after a newline stands for a missing one."""
    close: ClassVar[str]
    newlines: ClassVar[bool] = True
    """Whether one newline right inside a value's tags belongs to the markup."""
    untyped: ClassVar[frozenset[str]] = frozenset({"string"})
    """Types of an argument without a schema; empty: inferred from its text."""

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        opaque = (self.opaque or ("",))[0]
        self._marks = Marks(*self.around, self.lead, self.open, opaque)
        self._open = Marks(self.open)
        self._name_end = Marks(*self.name_end)
        self._key_end = Marks(self.key_end, self.value_open, self.parameter, self.close)
        self._value_open = Marks(self.value_open)
        self._value_end = Marks(*self.value_end)
        self._next = Marks(self.parameter, self.close)
        self._next_or_over = Marks(self.parameter, self.close, self.open, self.lead, *self.around)
        super().__init__(tools=tools)

    def read(self) -> Read[None]:
        """Read content and calls in turn."""
        while mark := (yield from self.until_call(self._marks)):
            if mark == self.lead and (yield from self.text.until_within(self._open, _MAX_HEADER)):
                mark = self.open
            if mark == self.open:
                yield from self._call([mark])

    def _call(self, source: list[str]) -> Read[None]:
        text, answer = self.text, self.answer
        header = yield from text.until_within(self._name_end, _MAX_HEADER)
        name = ""
        if header is not None:
            name = _unquoted(header[0])
            source += header
            if header[1] in self._next.texts:
                text.back(source.pop())
        source.append((yield from text.run(SPACES)))
        mark = (yield from text.accept(self._next)) if _is_name(name) else ""
        if not mark:
            answer.say("".join(source))
            return
        answer.start(name)
        answer.arguments("{")
        first = True
        while mark == self.parameter:
            key = yield from text.until_within(self._key_end, _MAX_HEADER)
            if key is None:
                mark = yield from text.until(self._next_or_over, _drop)
                continue
            if key[1] in self._next.texts:  # The key has no end, or no value.
                mark = key[1]
                continue
            answer.arguments(f"{'' if first else ', '}{json.dumps(_unquoted(key[0]))}: ")
            first = False
            finished = yield from self._value(
                name, _unquoted(key[0]), opened=key[1] != self.key_end
            )
            if not finished:
                return
            mark = yield from text.until(self._next_or_over, _drop)
        if not mark:
            return
        answer.arguments("}")
        answer.end()
        if mark != self.close:  # It is missing: all arguments are complete.
            text.back(mark)

    def _value(self, name: str, key: str, *, opened: bool) -> Read[bool]:
        """Read a value; return whether it is complete. opened: after its opening mark."""
        text, answer = self.text, self.answer
        if self.value_open and not opened:
            yield from text.run(SPACES)
            yield from text.accept(self._value_open)
        if self.newlines:
            yield from text.accept(_NEWLINE)
        types = parameter_types(self.schemas.get(name), key) or self.untyped
        value = TrailingNewlineFilter(self.newlines)
        if types == _STRING:
            answer.arguments('"')
            value.say = lambda part: answer.arguments(json.dumps(part, ensure_ascii=False)[1:-1])
        end = yield from text.until(self._value_end, value.add)
        if not end:
            return False
        if types == _STRING:
            answer.arguments('"')
        else:
            answer.arguments(json_of("".join(value.parts), types))
        if end.lstrip("\n") in self._next.texts:
            text.back(end.lstrip("\n"))
        return True


_NEWLINE = Marks("\n")
_STRING = frozenset({"string"})


def _drop(text: str) -> None:
    """Drop the text."""


class TrailingNewlineFilter:
    """Passes text on except for a newline at its end."""

    def __init__(self, enabled: bool) -> None:
        self.parts: list[str] = []
        self.say = self.parts.append
        self._enabled = enabled
        self._pending = ""

    def add(self, part: str) -> None:
        """Add the next piece of text."""
        part = self._pending + part
        self._pending = "\n" if self._enabled and part.endswith("\n") else ""
        part = part[: len(part) - len(self._pending)]
        if part:
            self.say(part)


def _unquoted(name: str) -> str:
    name = name.strip()
    if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
        return name[1:-1]
    return name


def _is_name(name: str) -> bool:
    return bool(name) and not any(char.isspace() or char in '<>"{' for char in name)
