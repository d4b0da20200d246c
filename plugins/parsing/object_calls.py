"""Tool calls with arguments in an object with bare keys and marked strings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .cursor import SPACES, EmitText, Marks, Read
from .schema_values import json_of, parameter_types
from .tool_machine import ToolMachine, closing, rest_of_call

_MAX_HEADER = 256
"""Most characters of a name or key."""
_HEADER = re.compile(r"\s*(?:call)?:\s*([\w.\-]+)\s*")
_KEY = re.compile(r'[^,{}\[\]()<>":]+')
_CLOSERS = {"{": "}", "(": ")", "[": "]"}
_STRING = frozenset({"string"})


class ObjectCallsParser(ToolMachine):
    """A call is open, `call:NAME{KEY:VALUE,…}`, close. A value is unescaped text between `quote`
    marks, an object, a list, or bare text up to `,` or a bracket.

    The tools' schemas determine the types of texts; bare text without a schema is what it looks
    like. Strings are passed on as they arrive; a call's mark ends them.
    """

    open: ClassVar[str]
    close: ClassVar[str]
    """Optional in the text."""
    quote: ClassVar[str]
    quoted: ClassVar[frozenset[str]] = _STRING
    """Types of marked text without a schema; empty: inferred."""

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._open = Marks(self.open)
        self._quote = Marks(self.quote)
        self._close_or_open = Marks(self.close, self.open)
        self._begin = Marks("{", "(", self.close, self.open)
        self._string_end = Marks(self.quote, self.close, self.open)
        ends = (",", "}", "]", self.quote, self.close, self.open)
        self._bare_end = {"}": Marks(*ends), ")": Marks(*ends, ")")}
        super().__init__(tools=tools)

    def read(self) -> Read[None]:
        while mark := (yield from self.text.until(self._open, self.answer.emit)):
            yield from self._call(mark)

    def _call(self, mark: str) -> Read[None]:
        text, answer = self.text, self.answer
        header = yield from text.until_within(self._begin, _MAX_HEADER)
        match = _HEADER.fullmatch(header[0]) if header else None
        if header is None or match is None or header[1] not in _CLOSERS:
            if header is not None:
                text.back("".join(header))
            answer.emit(mark)
            return
        answer.start(match[1])
        if (yield from self._object(self.schemas.get(match[1]), _CLOSERS[header[1]])):
            answer.end()
            yield from closing(text, answer, (self.close,), self._close_or_open)
        else:
            yield from rest_of_call(text, (self.close,), self._close_or_open)

    def _object(self, schema: Any, closer: str) -> Read[bool]:
        """Read the arguments after the opening bracket; return whether they are complete."""
        text, emit = self.text, self.answer.arguments
        stack, empty = [closer], True
        emit("{")
        while stack:
            char = yield from self._solid()
            if char == "," and not empty:
                text.skip(1)
                char = yield from self._solid()
                empty = char != stack[-1]
                if empty:
                    emit(", ")
            elif char != stack[-1] and not empty:
                return False
            if char == stack[-1]:
                text.skip(1)
                emit("]" if stack.pop() == "]" else "}")
                empty = False
                continue
            types: frozenset[str] = frozenset()
            if stack[-1] != "]":
                key = yield from self._key()
                if not key:
                    return False
                emit(f"{json.dumps(key, ensure_ascii=False)}: ")
                types = parameter_types(schema, key) if len(stack) == 1 else types
                char = yield from self._solid()
            if char and char in "{[":
                text.skip(1)
                emit(char)
                stack.append(_CLOSERS[char])
                empty = True
                continue
            if not (yield from self._scalar(char, types, emit, self._bare_end[closer])):
                return False
            empty = False
        return True

    def _solid(self) -> Read[str]:
        """Return the next character after whitespace, not consuming it; "" at the end."""
        yield from self.text.run(SPACES)
        return (yield from self.text.peek())

    def _key(self) -> Read[str]:
        """Consume and return a key and its colon; "" without one."""
        match = yield from self.text.until_within(_COLON, _MAX_HEADER)
        if match is None:
            return ""
        key = match[0].strip().removeprefix(self.quote).removesuffix(self.quote)
        if len(key) > 2 and key[0] == key[-1] == '"':
            key = key[1:-1]
        return key if _KEY.fullmatch(key) else ""

    def _scalar(self, char: str, types: frozenset[str], emit: EmitText, ends: Marks) -> Read[bool]:
        """Read a value that begins with `char`; return whether it is complete."""
        text = self.text
        if char == '"':  # As in JSON.
            return (yield from text.json(_drop, emit, self._close_or_open)) == "done"
        parts: list[str] = []
        if not (yield from text.accept(self._quote)):
            mark = yield from text.until(ends, parts.append)
            text.back(mark)
            word = "".join(parts).strip()
            if not mark or not word:
                return False
            emit(json_of(word, types))
            return True
        types = types or self.quoted
        streams = types == _STRING or bool(types & self.quoted)

        def add(part: str) -> None:
            if streams:
                emit(json.dumps(part, ensure_ascii=False)[1:-1])
            else:
                parts.append(part)

        if streams:
            emit('"')
        end = yield from text.until(self._string_end, add)
        if end != self.quote:
            text.back(end)
            return False
        emit('"' if streams else json_of("".join(parts), types))
        return True


_COLON = Marks(":")


def _drop(text: str) -> None:
    """Drop the text."""
