"""Tool calls with one tag per argument, as plain text: the XML-like dialects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .cursor import SPACES, EmitText, Marks, Read, whole_characters
from .schema_values import json_of, parameter_types
from .tool_machine import ToolMachine

_MAX_HEADER = 256
"""Most characters of a name."""


class TaggedCallsParser(ToolMachine):
    """A call is open, name, name_end, then for each argument parameter, key, key_end, value_open,
    value, value_end; then close. Marks `around` calls are dropped.

    The tools' schemas determine types. Strings are passed on as they arrive.
    """

    around: ClassVar[tuple[str, ...]] = ()
    lead: ClassVar[str] = ""
    """A mark before a call; dropped with the text between."""
    open: ClassVar[str]
    name_end: ClassVar[tuple[str, ...]] = (">",)
    parameter: ClassVar[str]
    key_end: ClassVar[str] = ">"
    value_open: ClassVar[str] = ""
    """Optional in the text."""
    value_end: ClassVar[tuple[str, ...]]
    """Texts that end a value; `parameter`, `close` or a mark around calls may replace one."""
    close: ClassVar[str]
    newlines: ClassVar[bool] = True
    """Whether one newline directly inside a value's tags is markup."""
    untyped: ClassVar[frozenset[str]] = frozenset({"string"})
    """Types of an argument without a schema; empty: inferred."""
    first_counts: ClassVar[bool] = False
    """Whether arguments with a repeated key are dropped."""
    wrappers: ClassVar[tuple[str, ...]] = ()
    """Keys under which a model may write all arguments as one object; used if the tool has no such
    argument, but all those inside."""
    all_open: ClassVar[str] = ""
    """A mark before all arguments as one JSON object."""
    last: ClassVar[tuple[str, ...]] = ()
    """Marks around calls after which text is dropped."""

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        opaque = (self.opaque or ("",))[0]
        self._marks = Marks(*self.around, self.lead, self.open, opaque)
        self._open = Marks(self.open)
        self._name_end = Marks(*self.name_end)
        self._key_end = Marks(self.key_end, self.value_open, self.parameter, self.close)
        self._value_open = Marks(self.value_open)
        self._value_end = Marks(*self.value_end)
        self._all_open = Marks(self.all_open)
        self._next = Marks(self.parameter, self.close)
        self._next_or_over = Marks(self.parameter, self.close, self.open, self.lead, *self.around)
        super().__init__(tools=tools)

    def read(self) -> Read[None]:
        while mark := (yield from self.until_call(self._marks)):
            if mark in self.last and self.answer.calls:
                yield from self.text.until(Marks(), _drop)
            if mark == self.lead and (yield from self.text.until_within(self._open, _MAX_HEADER)):
                mark = self.open
            if mark == self.open:
                yield from self.call([mark])

    def call(self, source: list[str]) -> Read[None]:
        """Read a call. source: consumed text, which is content if no call follows."""
        text, answer = self.text, self.answer
        header = yield from text.until_within(self._name_end, _MAX_HEADER)
        name = ""
        if header is not None:
            name = self.name_of(header[0])
            source += header
            if header[1] in self._next.texts:
                text.back(source.pop())
        source.append((yield from text.run(SPACES)))
        if _is_name(name) and (yield from text.accept(self._all_open)):
            yield from self._all_arguments(name)
            return
        mark = (yield from text.accept(self._next)) if _is_name(name) else ""
        if not mark:
            answer.emit("".join(source))
            return
        answer.start(name)
        answer.arguments("{")
        keys: set[str] = set()
        while mark == self.parameter:
            key = yield from text.until_within(self._key_end, _MAX_HEADER)
            if key is None:
                mark = yield from text.until(self._next_or_over, _drop)
                continue
            if key[1] in self._next.texts:  # The key has no end, or no value.
                mark = key[1]
                continue
            argument, types = self.argument(name, key[0])
            emit: EmitText = answer.arguments
            wrapped: list[str] = []
            wraps = not keys and argument in self.wrappers
            if self.first_counts and argument in keys:
                emit = _drop
            elif wraps:
                emit = wrapped.append
            emit(f"{', ' if keys else ''}{json.dumps(argument)}: ")
            keys.add(argument)
            finished = yield from self._value(types, emit, opened=key[1] != self.key_end)
            if finished:
                mark = yield from text.until(self._next_or_over, _drop)
            if wraps:
                alone = finished and mark != self.parameter
                inner = self._unwrapped(name, argument, "".join(wrapped[1:])) if alone else ""
                answer.arguments(inner or "".join(wrapped))
            if not finished:
                return
        if not mark:
            return
        answer.arguments("}")
        answer.end()
        if mark != self.close:  # It is missing: all arguments are complete.
            text.back(mark)

    def _all_arguments(self, name: str) -> Read[None]:
        """Read a call's arguments as one object, up to its end."""
        text, answer = self.text, self.answer
        answer.start(name)
        yield from text.run(SPACES)
        status = "bad"
        if (yield from text.peek()) == "{":
            status = yield from text.json(_drop, answer.arguments, self._next_or_over)
        if status == "done":
            answer.end()
        mark = yield from text.until(self._next_or_over, _drop)
        if mark != self.close:
            text.back(mark)

    def _unwrapped(self, name: str, key: str, value: str) -> str:
        """Return a wrapper's arguments without braces; "" if there are none."""
        schema = self.schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping) or key in properties:
            return ""
        try:
            if value.startswith('"'):
                value = json_of(whole_characters(json.loads(value)), _OBJECT)
            arguments = json.loads(value)
        except RecursionError:
            return ""
        inner = isinstance(arguments, dict) and all(key in properties for key in arguments)
        return value.strip()[1:-1] if inner else ""

    def name_of(self, header: str) -> str:
        return _unquoted(header)

    def argument(self, name: str, header: str) -> tuple[str, frozenset[str]]:
        """Return an argument's key and types (empty: inferred)."""
        key = _unquoted(header)
        return key, parameter_types(self.schemas.get(name), key) or self.untyped

    def _value(self, types: frozenset[str], emit: EmitText, *, opened: bool) -> Read[bool]:
        """Read a value; return whether it is complete. opened: after its opening mark."""
        text = self.text
        if self.value_open and not opened:
            yield from text.run(SPACES)
            yield from text.accept(self._value_open)
        if self.newlines:
            yield from text.accept(_NEWLINE)
        value = TrailingNewlineFilter(self.newlines)
        if types == _STRING:
            emit('"')
            value.emit = lambda part: emit(json.dumps(part, ensure_ascii=False)[1:-1])
        end = yield from text.until(self._value_end, value.add)
        if not end:
            return False
        if types == _STRING:
            emit('"')
        else:
            emit(json_of("".join(value.parts), types))
        if end.lstrip("\n") in self._next_or_over.texts:
            text.back(end.lstrip("\n"))
        return True


_NEWLINE = Marks("\n")
_STRING = frozenset({"string"})
_OBJECT = frozenset({"object"})


def _drop(text: str) -> None:
    """Drop the text."""


class TrailingNewlineFilter:
    """Removes a newline at the text's end."""

    def __init__(self, enabled: bool) -> None:
        self.parts: list[str] = []
        self.emit: EmitText = self.parts.append
        self._enabled = enabled
        self._pending = ""

    def add(self, part: str) -> None:
        part = self._pending + part
        self._pending = "\n" if self._enabled and part.endswith("\n") else ""
        part = part[: len(part) - len(self._pending)]
        if part:
            self.emit(part)


def _unquoted(name: str) -> str:
    name = name.strip()
    if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
        return name[1:-1]
    return name


def _is_name(name: str) -> bool:
    return bool(name) and not any(char.isspace() or char in '<>"{' for char in name)
