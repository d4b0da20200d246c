"""Finds the value that makes a JSON text unreadable, for the error message."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...core.errors import SHOWN, shortened

MOST_BYTES = 1 << 20
"""Longer texts are not searched: their parsing would keep the interpreter from other threads."""
READABLE = 0
"""Stands for any number that can be read."""
HALF_PAIR = "has half of a surrogate pair, as of a character that was cut"
_SURROGATE = re.compile("[\ud800-\udfff]")


class UnreadableValue(NamedTuple):
    """A number out of range (1e999), one that JSON does not have (NaN), or half a character."""

    path: str
    """Such as `messages[0].content`; empty: the text is the value."""
    reason: str


class _Unreadable(str):
    """The number as written, and why."""

    reason: str


class _Object(list[tuple[str, Any]]):
    """An object's fields, also those of equal names."""


def unreadable_value(body: bytes) -> UnreadableValue | None:
    """Return the first such value of a text; None: there is none, more is wrong with it, or it is
    longer than MOST_BYTES."""
    if len(body) > MOST_BYTES:
        return None
    try:
        value = json.loads(
            body.decode(), parse_int=_integer, parse_float=_number, parse_constant=_constant,
            object_pairs_hook=_Object,
        )  # fmt: skip
    except (ValueError, RecursionError):
        return None
    # Names are joined at the end alone: the paths of all values may be longer than the text.
    names: list[str | int] = []
    levels = [iter([("", value)])]
    while levels:
        for name, child in levels[-1]:
            reason = _reason(name, child)
            if reason is not None:
                return UnreadableValue(_joined([*names[1:], name]), reason)
            if isinstance(child, list):
                names.append(name)
                levels.append(_entries(child))
                break
        else:
            levels.pop()
            del names[-1:]
    return None


def _reason(name: str | int, value: Any) -> str | None:
    """Return what is wrong with a field, or an entry of a list."""
    if isinstance(name, str) and _SURROGATE.search(name):
        return f"the name {HALF_PAIR}"
    if isinstance(value, _Unreadable):
        return value.reason
    return HALF_PAIR if isinstance(value, str) and _SURROGATE.search(value) else None


def _entries(value: list[Any]) -> Iterator[tuple[Any, Any]]:
    return iter(value) if isinstance(value, _Object) else iter(enumerate(value))


def _joined(names: list[str | int]) -> str:
    parts = (f"[{name}]" if isinstance(name, int) else f".{name[:SHOWN]}" for name in names)
    path = shortened("".join(parts).removeprefix("."))
    return path.encode("utf-8", "replace").decode()  # A name may have half a surrogate pair.


def _unreadable(text: str, reason: str) -> _Unreadable:
    number = _Unreadable(text)
    number.reason = f"{shortened(text)} {reason}"
    return number


def _integer(text: str) -> Any:
    try:
        int(text)
    except ValueError:  # Python's limit on digits, as msgspec's.
        return _unreadable(text, "is out of range")
    return READABLE


def _number(text: str) -> Any:
    return _unreadable(text, "is out of range") if math.isinf(float(text)) else READABLE


def _constant(text: str) -> Any:
    return _unreadable(text, "is not a number in JSON")
