"""Large responses are built on a thread, and encoded and sent in pieces.

The event loop serves others meanwhile, the interpreter lock is never held for long, and of all the
Python objects that a response would need only those of one piece exist at a time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import uuid
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import msgspec
from aiohttp import payload
from aiohttp.abc import AbstractStreamWriter

P = ParamSpec("P")
T = TypeVar("T")
FEW_VALUES = 4096
"""Up to this many log-probabilities or numbers are converted on the event loop."""
SENT_AT_ONCE = 1 << 18
"""Bytes of a large body that are given to the transport at once."""
_builder = concurrent.futures.ThreadPoolExecutor(1, "jackfield-responses")
"""One thread: several would only compete for the interpreter lock with the event loop."""
_MARK = b'"%b"' % uuid.uuid4().hex.encode()
"""Placeholder for an array in a body; random, so that it occurs in no text."""


async def off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of `work` on `size` values; runs on a thread if there are many."""
    if size <= FEW_VALUES:
        return work(*args, **kwargs)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_builder, lambda: work(*args, **kwargs))


class Pieces:
    """A JSON array that is encoded already, in pieces."""

    def __init__(self, arrays: list[bytes]) -> None:
        """arrays: the pieces, arrays with at least one item each."""
        parts = [part for array in arrays for part in (b",", array[1:-1])]
        self.parts = [b"[", *parts[1:], b"]"]
        """The text of the whole array, in parts."""


def in_pieces(items: Any, at_once: int, build: Callable[[Any], list[Any]]) -> Any:
    """Return `build(items)`, as Pieces if there are more than `at_once` items. `build` converts
    items one by one, without regard to their neighbours."""
    if len(items) <= at_once:
        return build(items)
    starts = range(0, len(items), at_once)
    return Pieces([msgspec.json.encode(build(items[at : at + at_once])) for at in starts])


def whole_array(value: Any) -> msgspec.Raw:
    """Return Pieces as one text: the `enc_hook` of an encoder."""
    if not isinstance(value, Pieces):
        raise NotImplementedError(f"{type(value).__name__} is no JSON")
    return msgspec.Raw(b"".join(value.parts))


def encoded_parts(data: Any) -> list[bytes]:
    """Return the JSON text of `data` in parts, without copying those of its Pieces."""
    arrays: list[Pieces] = []

    def mark(value: Any) -> msgspec.Raw:
        if not isinstance(value, Pieces):
            return whole_array(value)
        arrays.append(value)
        return msgspec.Raw(_MARK)

    first, *others = msgspec.json.encode(data, enc_hook=mark).split(_MARK)
    parts = [first]
    for array, between in zip(arrays, others, strict=True):
        parts += (*array.parts, between)
    return parts


class JsonParts(payload.Payload):
    """A response's body in parts, each of which is sent once those before it have gone."""

    def __init__(self, parts: list[bytes]) -> None:
        super().__init__(parts, content_type="application/json")
        self._size = sum(map(len, parts))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the text, for logs."""
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Send the body."""
        for part in self._value:
            for at in range(0, len(part), SENT_AT_ONCE):
                await writer.write(part[at : at + SENT_AT_ONCE])
