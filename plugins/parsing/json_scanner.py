"""Scans one JSON value that arrives in pieces: strictly, in linear time, keeping only the nesting.

It reports where the value ends, and at which character it stops being JSON.
"""

from __future__ import annotations

import re
from typing import Literal

_SPACE = frozenset(" \t\r\n")
_HEX = frozenset("0123456789abcdefABCDEF")
_STRING_STOP = re.compile(r'["\\]')
_LITERALS = {"t": "true", "f": "false", "n": "null"}

_NUMBER: dict[str, dict[str, str]] = {
    "-": {"0": "0", "d": "i"},
    "0": {".": ".", "e": "e"},
    "i": {"0": "i", "d": "i", ".": ".", "e": "e"},
    ".": {"0": "f", "d": "f"},
    "f": {"0": "f", "d": "f", "e": "e"},
    "e": {"0": "x", "d": "x", "s": "+", "-": "+"},
    "+": {"0": "x", "d": "x"},
    "x": {"0": "x", "d": "x"},
}
"""State of a number → class of the next character → next state."""
_NUMBER_CLASS = {**{d: "d" for d in "123456789"}, "0": "0", "-": "-", "+": "s"} | {
    ".": ".",
    "e": "e",
    "E": "e",
}
_NUMBER_ENDS = frozenset("0ifx")

Status = Literal["more", "done", "bad"]


class JsonScanner:
    """Tracks one JSON value; `scan` returns how far it reaches.

    A top-level number ends only with the next character.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._expect = "value"
        """What may follow: value, first (value or `]`), key, firstkey (key or `}`), colon, after
        (comma or closing bracket); or inside a scalar: string, escape, hex, literal, number."""
        self._is_key = False
        self._hex_left = 0
        self._literal = ""
        self._number = ""

    @property
    def in_string(self) -> bool:
        """Whether the text ends inside a string, outside an escape."""
        return self._expect == "string"

    def scan(self, text: str, start: int = 0, stop: int | None = None) -> tuple[Status, int]:
        """Scan text[start:stop].

        Returns ("more", stop), ("done", index after the value), or ("bad", index of the first
        invalid character).
        """
        position, size = start, len(text) if stop is None else stop
        stack = self._stack
        expect = self._expect
        while position < size:
            char = text[position]
            if expect == "string":
                match = _STRING_STOP.search(text, position, size)
                if match is None:
                    position = size
                    break
                position = match.end()
                if match[0] == "\\":
                    expect = "escape"
                    continue
                expect = "colon" if self._is_key else "after"
                if expect == "after" and not stack:
                    return self._stop(expect, "done", position)
                continue
            if expect in ("escape", "hex", "literal", "number"):
                if expect == "number":
                    following = _NUMBER[self._number].get(_NUMBER_CLASS.get(char, ""))
                    if following is None:
                        if self._number not in _NUMBER_ENDS:
                            return self._stop(expect, "bad", position)
                        expect = "after"
                        if not stack:
                            return self._stop(expect, "done", position)
                        continue
                    self._number = following
                elif expect == "escape":
                    if char == "u":
                        expect, self._hex_left = "hex", 4
                    elif char in '"\\/bfnrt':
                        expect = "string"
                    else:
                        return self._stop(expect, "bad", position)
                elif expect == "hex":
                    if char not in _HEX:
                        return self._stop(expect, "bad", position)
                    self._hex_left -= 1
                    if not self._hex_left:
                        expect = "string"
                else:
                    if char != self._literal[0]:
                        return self._stop(expect, "bad", position)
                    self._literal = self._literal[1:]
                    if not self._literal:
                        expect = "after"
                        if not stack:
                            return self._stop(expect, "done", position + 1)
                position += 1
                continue
            if char in _SPACE:
                position += 1
                continue
            if expect == "value" or expect == "first":
                if char == "{":
                    stack.append("}")
                    expect = "firstkey"
                elif char == "[":
                    stack.append("]")
                    expect = "first"
                elif char == '"':
                    self._is_key = False
                    expect = "string"
                elif char == "]" and expect == "first":
                    stack.pop()
                    expect = "after"
                elif char in _LITERALS:
                    self._literal = _LITERALS[char][1:]
                    expect = "literal"
                elif char == "-" or (char.isascii() and char.isdigit()):
                    self._number = char if char in "-0" else "i"
                    expect = "number"
                else:
                    return self._stop(expect, "bad", position)
            elif expect == "after":
                if char == ",":
                    expect = "key" if stack[-1] == "}" else "value"
                elif char == stack[-1]:
                    stack.pop()
                else:
                    return self._stop(expect, "bad", position)
            elif expect == "colon":
                if char != ":":
                    return self._stop(expect, "bad", position)
                expect = "value"
            elif char == '"':
                self._is_key = True
                expect = "string"
            elif char == "}" and expect == "firstkey":
                stack.pop()
                expect = "after"
            else:
                return self._stop(expect, "bad", position)
            position += 1
            if expect == "after" and not stack:
                return self._stop(expect, "done", position)
        self._expect = expect
        return "more", position

    def _stop(self, expect: str, status: Status, position: int) -> tuple[Status, int]:
        self._expect = expect
        return status, position
