"""Builds large responses on a thread, and encodes and sends them in pieces.

So the event loop is free, the interpreter lock is held briefly, and only one piece's Python objects
exist at a time.
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

from ...core.outputs import CompletionOutput

P = ParamSpec("P")
T = TypeVar("T")
FEW_VALUES = 4096
"""Most log-probabilities or numbers converted on the event loop."""
SENT_AT_ONCE = 1 << 18
"""Bytes per write to the transport."""
_builder = concurrent.futures.ThreadPoolExecutor(1, "jackfield-responses")
"""One thread: more would compete with the event loop for the interpreter lock."""
_MARK = b'"%b"' % uuid.uuid4().hex.encode()
"""Placeholder for an array; random, so in no text."""


def routed_size(completion: CompletionOutput) -> int:
    """Return about how many values take as long as a completion's routed experts."""
    routed = completion.routed_experts
    return 0 if routed is None else int(routed.size) // 64


async def off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` on `size` values, on a thread if many."""
    if size <= FEW_VALUES:
        return work(*args, **kwargs)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_builder, lambda: work(*args, **kwargs))


class Pieces:
    """A JSON array encoded in pieces."""

    def __init__(self, arrays: list[bytes]) -> None:
        """arrays: nonempty pieces."""
        parts = [part for array in arrays for part in (b",", array[1:-1])]
        self.parts = [b"[", *parts[1:], b"]"]
        """The array's text in parts."""


def in_pieces(items: Any, at_once: int, build: Callable[[Any], list[Any]]) -> Any:
    """Return `build(items)`, as Pieces beyond `at_once` items. `build` converts items
    independently.
    """
    if len(items) <= at_once:
        return build(items)
    starts = range(0, len(items), at_once)
    return Pieces([msgspec.json.encode(build(items[at : at + at_once])) for at in starts])


def whole_array(value: Any) -> msgspec.Raw:
    """Return Pieces as one text: an encoder's `enc_hook`."""
    if not isinstance(value, Pieces):
        raise NotImplementedError(f"{type(value).__name__} is no JSON")
    return msgspec.Raw(b"".join(value.parts))


def encoded_parts(data: Any) -> list[bytes]:
    """Return `data`'s JSON in parts, without copying Pieces."""
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
    """A body in parts, each sent after the previous one."""

    def __init__(self, parts: list[bytes]) -> None:
        super().__init__(parts, content_type="application/json")
        self._size = sum(map(len, parts))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for part in self._value:
            for at in range(0, len(part), SENT_AT_ONCE):
                await writer.write(part[at : at + SENT_AT_ONCE])
