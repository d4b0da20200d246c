"""Calls that are read block by block, as a block is only meaningful as a whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from .cursor import Marks, Read
from .python_values import python_value
from .schema_values import json_of, parameter_types
from .tool_machine import ToolMachine

_ATTRIBUTE = re.compile(r"""\s*("[^"]+"|'[^']+'|[^\s"'<>]+)\s*>""")


class BlockCallsParser(ToolMachine):
    """A block is open, text, close. A family's `calls` reads it; a block without calls is content
    with its marks, as is an unfinished one, unless the family reads it.
    """

    open: ClassVar[tuple[str, ...]]
    close: ClassVar[str]
    verbatim: ClassVar[tuple[str, str] | None] = None
    """Marks inside a block between which `close` does not end it."""
    ends_turn: ClassVar[bool] = False
    """Whether text after a block with calls is dropped; further blocks are read."""
    reads_unfinished: ClassVar[bool] = False
    """Whether the complete calls of an unfinished block count."""

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._open = Marks(*self.open)
        self._in_block = Marks(self.close, *self.open, (self.verbatim or ("",))[0])
        super().__init__(tools=tools)

    def calls(self, block: str) -> list[tuple[str, str]] | None:
        """Return a block's calls as (name, JSON arguments); None if it is not a block of calls."""
        raise NotImplementedError

    def read(self) -> Read[None]:
        text, answer = self.text, self.answer
        mark = yield from text.until(self._open, answer.emit)
        while mark:
            block: list[str] = []
            end = yield from text.until(self._in_block, block.append)
            while self.verbatim is not None and end == self.verbatim[0]:
                block.append(end)
                block.append((yield from text.until(Marks(self.verbatim[1]), block.append)))
                end = yield from text.until(self._in_block, block.append)
            calls = None
            if end == self.close or self.reads_unfinished:
                calls = self.calls("".join(block))
            if not calls:
                answer.emit("".join([mark, *block, end if end == self.close else ""]))
            for name, arguments in calls or ():
                answer.start(name)
                answer.arguments(arguments)
                answer.end()
            if end in self.open:
                mark = end
                continue
            dropped = self.ends_turn and answer.calls
            mark = yield from text.until(self._open, _drop if dropped else answer.emit)

    def types(self, name: str, key: str) -> frozenset[str]:
        """Return an argument's types by the tool's schema; empty if unknown."""
        return parameter_types(self.schemas.get(name), key)


def objects(arguments: Mapping[str, str]) -> str:
    """Return the JSON of an object from values in JSON."""
    return "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in arguments.items()) + "}"


def value_of(text: str, types: frozenset[str]) -> str:
    """Return text as JSON of one of these types, else of whatever it reads as in JSON or Python,
    else as a string.
    """
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    value = json_of(text, types)
    if value.startswith('"') and "string" not in types:
        value = json_of(text, frozenset())
        if value.startswith('"') and (source := python_value(text.strip())) is not None:
            return source
    return value


def elements(text: str, openers: Mapping[str, str]) -> Iterator[tuple[str, str] | None]:
    """Yield (opener, text inside) of consecutive elements; finally None if more than whitespace
    remains. `openers`: opening tag → closing tag.
    """
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        opener = next((tag for tag in openers if text.startswith(tag, position)), None)
        begin = position + len(opener or "")
        end = text.find(openers[opener], begin) if opener else -1
        if opener is None or end < 0:
            yield None
            return
        yield opener, text[begin:end]
        position = end + len(openers[opener])


def attribute(text: str, position: int = 0) -> tuple[str, int] | None:
    """Return the attribute's value in the rest of a tag, `"f">…`, and the position after the tag;
    None without one.
    """
    match = _ATTRIBUTE.match(text, position)
    if match is None:
        return None
    value = match[1]
    return value[1:-1] if value[0] in "\"'" else value, match.end()


def object_of(text: str) -> dict[str, str] | None:
    """Return an object's values as JSON, by key; None for other text, NaN or infinity, or too deep
    nesting.
    """
    try:
        values = json.loads(text, strict=False)
        if not isinstance(values, dict):
            return None
        return {key: json.dumps(value, allow_nan=False) for key, value in values.items()}
    except (ValueError, RecursionError):
        return None


def _drop(text: str) -> None:
    """Drop the text."""
