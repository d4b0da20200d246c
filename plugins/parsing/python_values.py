"""Converts Python literals in calls to JSON as they arrive."""

from __future__ import annotations

import functools
import json
import re
from typing import NamedTuple

from .cursor import SPACE, SPACES, Cursor, EmitText, Marks, Read

_WORD = re.compile(r"[\w.+\-]+")
_MAX_NUMBER = 64
"""Most characters of a number that is not JSON (`1_000`, `0x1f`, `.5`)."""
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_CONSTANTS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_TRIPLE = Marks('"""', "'''")
_SINGLE = Marks('"', "'")
_AFTER_STRING = ",:)]}"
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v",
            "\\": "\\", "'": "'", '"': '"'}  # fmt: skip
_HEX_SIZES = {"x": 2, "u": 4, "U": 8}
_HEX, _OCTAL = "0123456789abcdefABCDEF", "01234567"
_LISTS = re.compile(r"[\[(]+")
_CLOSERS = {"[": "]", "(": ")"}


class Strings(NamedTuple):
    """How strings end."""

    ends: tuple[str, ...] = ()
    """Marks that end a string and the literal, unless the string continues to its quote."""
    loose: bool = False
    """Whether a quote is text unless something may follow that follows a string: the model does not
    escape quotes."""


STRICT = Strings()


def read_value(text: Cursor, emit: EmitText, strings: Strings = STRICT) -> Read[str | None]:
    """Consume a literal and pass it on as JSON: lists and tuples as arrays, dictionaries as
    objects.

    Return None for a complete literal, else the text at which it failed: the output is a prefix of
    JSON.
    """
    stack: list[str] = []
    while True:
        char = text.here
        if not char or char in SPACE:
            char = yield from _solid(text)
        if char == "{":
            text.skip(1)
            emit("{")
            stack.append("}")
            if (yield from _solid(text)) != "}":
                slip = yield from _key(text, emit, strings)
                if slip is not None:
                    return slip
                continue
        elif char and char in _CLOSERS:
            opened = yield from text.run(_LISTS)
            emit("[" * len(opened))
            stack.extend(_CLOSERS[bracket] for bracket in opened)
            if (yield from _solid(text)) != stack[-1]:
                continue
        else:
            slip = yield from _scalar(text, emit, strings)
            if slip is not None:
                return slip
        while stack:
            char = yield from _solid(text)
            comma = char == ","
            if comma:
                text.skip(1)
                char = yield from _solid(text)
            if char == stack[-1]:
                text.skip(1)
                emit("}" if stack.pop() == "}" else "]")
                continue
            if not comma or not char:
                return ""
            emit(", ")
            slip = (yield from _key(text, emit, strings)) if stack[-1] == "}" else None
            if slip is not None:
                return slip
            break
        else:
            return None


def _solid(text: Cursor) -> Read[str]:
    """Return the next character after whitespace, not consuming it; "" at the end."""
    yield from text.run(SPACES)
    return (yield from text.peek())


def python_value(text: str) -> str | None:
    """Return a complete Python literal as JSON; None for other text."""
    cursor = Cursor()
    cursor.add(text)
    cursor.end()
    parts: list[str] = []
    try:
        next(read_value(cursor, parts.append))
    except StopIteration as stop:
        return "".join(parts) if stop.value is None and not cursor.rest().strip() else None
    return None


def _key(text: Cursor, emit: EmitText, strings: Strings) -> Read[str | None]:
    """Read a dictionary's key, as a string, and its colon."""
    if (yield from text.peek()) in ('"', "'"):
        slip = yield from _string(text, emit, strings)
    else:
        parts: list[str] = []
        slip = yield from _scalar(text, parts.append, strings)
        if slip is None:
            emit(json.dumps("".join(parts)))
    if slip is not None:
        return slip
    if (yield from _solid(text)) != ":":
        return ""
    text.skip(1)
    emit(": ")
    return None


def _scalar(text: Cursor, emit: EmitText, strings: Strings) -> Read[str | None]:
    if (yield from text.peek()) in ('"', "'"):
        return (yield from _string(text, emit, strings))
    word = yield from text.run(_WORD)
    json_text = _CONSTANTS.get(word) or _number(word)
    if not json_text:
        return word
    emit(json_text)
    return None


def _number(word: str) -> str:
    if _JSON_NUMBER.fullmatch(word):
        return word
    if len(word) > _MAX_NUMBER or not word.isascii():
        return ""
    for read in (_any_base, int, float):
        try:
            return json.dumps(read(word), allow_nan=False)
        except ValueError:
            continue
    return ""


def _any_base(word: str) -> int:
    return int(word, 0)


@functools.cache
def _string_marks(quote: str, ends: tuple[str, ...]) -> Marks:
    return Marks(quote, "\\", *ends)


def _string(text: Cursor, emit: EmitText, strings: Strings) -> Read[str | None]:
    def escaped(part: str) -> None:
        emit(json.dumps(part, ensure_ascii=False)[1:-1])

    quote = yield from text.accept(_TRIPLE)
    if not quote:
        quote = yield from text.accept(_SINGLE)
    emit('"')
    marks = _string_marks(quote, strings.ends)
    while True:
        mark = yield from text.until(marks, escaped)
        if mark == quote:
            if not strings.loose or len(quote) > 1:
                break
            gap = yield from text.run(SPACES)
            following = yield from text.peek()
            if not following or following in _AFTER_STRING:
                break
            escaped(quote + gap)
            continue
        if mark in strings.ends:
            text.back(mark)
            if len(quote) > 1 or not (
                yield from text.string_goes_on(len(mark), quote, _AFTER_STRING)
            ):
                return ""
            text.skip(len(mark))
            escaped(mark)
            continue
        char = (yield from text.peek()) if mark else ""
        if not char:
            return ""
        known = char in _ESCAPES or char in _HEX_SIZES or char in _OCTAL or char == "\n"
        if not known:  # The character after it may begin a mark.
            escaped("\\")
            continue
        text.skip(1)
        if char in _ESCAPES:
            escaped(_ESCAPES[char])
        elif char in _HEX_SIZES:
            size = _HEX_SIZES[char]
            digits = yield from _digits(text, _HEX, size)
            if len(digits) == size and int(digits, 16) <= 0x10FFFF:
                code = int(digits, 16)
                emit(json.dumps(chr(code), ensure_ascii=0xD800 <= code < 0xE000)[1:-1])
            else:
                escaped("\\" + char + digits)
        elif char in _OCTAL:
            escaped(chr(int(char + (yield from _digits(text, _OCTAL, 2)), 8)))
    emit('"')
    return None


def _digits(text: Cursor, allowed: str, most: int) -> Read[str]:
    digits = ""
    while len(digits) < most:
        char = yield from text.peek()
        if not char or char not in allowed:
            break
        text.skip(1)
        digits += char
    return digits
