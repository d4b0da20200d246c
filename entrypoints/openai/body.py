"""Request bodies: unpacked within bounds and only when they are read, decoded off the event loop
where that takes long."""

from __future__ import annotations

import asyncio
import re
import zlib
from typing import Any, TypeVar

from aiohttp import web

from ...core.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType
from .context import OPTIONS
from .protocol import convert, decode, parse
from .tenants import TENANCY, received, tenant_of

T = TypeVar("T")
WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Content-Encoding → zlib's wbits."""
MAX_RATIO = 100
"""Unpacked bytes to packed ones, beyond FREE_BYTES."""
FREE_BYTES = 1 << 20
STEP_BYTES = 1 << 18
"""Unpacked at a time."""
INLINE_BYTES = 1 << 16
"""Bodies up to here are decoded on the event loop: however they are built, that is quick."""
VALUE, CONTAINER, KEY, ESCAPE = 8, 64, 192, 1
"""Eighths of a value: what decoding costs, in time and memory."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.S)


class Request(web.Request):
    """A request whose body is as it was sent until a handler reads it.

    So nothing is unpacked for a request that is refused: by its key, its path or its method.
    """

    ATTRS = web.Request.ATTRS | {"_plain"}
    _plain: bytes | None = None

    async def read(self) -> bytes:
        """The body, unpacked. Raises UnsupportedMediaType, BodyTooLarge, InvalidRequest, and
        HTTPRequestEntityTooLarge for what is too large already as it was sent."""
        if self._plain is None:
            window = _window(self)
            raw = await super().read()
            if window is None:
                self._plain = raw
            elif len(raw) > 1 << 12:
                self._plain = await asyncio.to_thread(unpack, raw, window, self._client_max_size)
            else:
                self._plain = unpack(raw, window, self._client_max_size)
        return self._plain

    async def multipart(self) -> Any:
        """As it comes: files are sent as they are. Raises UnsupportedMediaType."""
        if _window(self) is not None:
            raise UnsupportedMediaType(
                "a multipart body cannot be packed; send it without Content-Encoding"
            )
        return await super().multipart()


def _window(request: web.BaseRequest) -> int | None:
    """zlib's wbits for a body; None: it is not packed. Raises UnsupportedMediaType."""
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in WINDOWS:
        raise UnsupportedMediaType(
            f"Content-Encoding: {encoding[:40]!r} is not known here (there are: gzip, deflate)"
        )
    return WINDOWS[encoding]


def unpack(packed: bytes, window: int, max_bytes: int) -> bytes:
    """At most `max_bytes`, and at most MAX_RATIO times what came. Raises BodyTooLarge,
    InvalidRequest."""
    limit = min(max_bytes, max(FREE_BYTES, len(packed) * MAX_RATIO))
    if window == 15 and packed[:1] and packed[0] & 0xF != 8:
        window = -15  # Some send deflate without zlib's header.
    unpacker = zlib.decompressobj(window)
    parts: list[bytes] = []
    size, rest = 0, packed
    try:
        while rest and not unpacker.eof:
            parts.append(unpacker.decompress(rest, STEP_BYTES))
            size += len(parts[-1])
            rest = unpacker.unconsumed_tail
            if size > limit:
                raise BodyTooLarge(
                    f"the body unpacks to more than {limit} bytes, from {len(packed)} "
                    "(--max-body-bytes)"
                )
        parts.append(unpacker.flush())  # What a step left over: less than another one.
    except zlib.error as error:
        raise InvalidRequest(f"the body cannot be unpacked: {error}") from None
    if packed and not unpacker.eof:
        raise InvalidRequest("the body cannot be unpacked: it ends too early")
    if unpacker.unused_data:
        raise InvalidRequest("the body cannot be unpacked: there is more behind its end")
    return b"".join(parts)


async def decoded(request: web.Request, kind: type[T]) -> T:
    """The JSON body of a request, as a struct; plugins may change it before it is checked. Raises
    InvalidRequest with the field's path, UnsupportedMediaType, BodyTooLarge, and what a plugin
    refuses with."""
    check_json(request)
    body = await request.read()
    large = len(body) > INLINE_BYTES
    if request.app[TENANCY].received:
        raw = await asyncio.to_thread(_parse, request, body) if large else parse(body)
        raw = await received(request, raw)
        asked = await asyncio.to_thread(convert, raw, kind) if large else convert(raw, kind)
    elif large:
        asked = await asyncio.to_thread(lambda: convert(_parse(request, body), kind))
    else:
        asked = decode(body, kind)
    if (cap := tenant_of(request).limits.max_tokens) is not None and hasattr(kind, "token_cap"):
        asked.token_cap = cap  # type: ignore[attr-defined]
    return asked


def _parse(request: web.Request, body: bytes) -> dict[str, Any]:
    check_weight(body, request.app[OPTIONS].max_json_values)
    return parse(body)


def check_json(request: web.Request) -> None:
    """Raises UnsupportedMediaType unless the body says that it is JSON.

    A browser asks the server first before it sends that type from another site's page.
    """
    given = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if given != "application/json" and not given.endswith("+json"):
        hint = " (curl: -H content-type:application/json)" if "urlencoded" in given else ""
        raise UnsupportedMediaType(
            f"Content-Type: must be application/json, got {given[:80] or 'none'}{hint}"
        )


def check_weight(body: bytes, limit: int) -> None:
    """Raises BodyTooLarge where JSON has more than `limit` values.

    An array or object counts as eight, a key of an object as 24, eight escapes in texts as one:
    what they take of time and memory. Large texts are looked through only where a count of all
    bytes, which is quick, does not suffice.
    """
    if _weight(body) <= limit * VALUE:
        return
    weight, end = 0, 0
    for text in _STRING.finditer(body):
        start, stop = text.span()
        weight += _weight(body[end:start]) + ESCAPE * body.count(b"\\", start, stop)
        end = stop
    if weight + _weight(body[end:]) > limit * VALUE:
        raise BodyTooLarge(
            f"the body has too many values for a server that takes {limit} (--max-json-values; "
            "an array or object counts as 8, a key as 24)"
        )


def _weight(part: bytes) -> int:
    if len(part) == 1 and part in b":,":
        return KEY if part == b":" else VALUE
    return (
        VALUE * part.count(b",")
        + CONTAINER * (part.count(b"[") + part.count(b"{"))
        + KEY * part.count(b":")
        + ESCAPE * part.count(b"\\")
    )
