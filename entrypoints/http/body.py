"""Request bodies: decompressed within limits, when a handler reads them."""

from __future__ import annotations

import asyncio
import re
import zlib
from typing import Any

from aiohttp import web

from ...core.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType

WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
MAX_RATIO = 100
"""Largest compression ratio beyond FREE_BYTES."""
FREE_BYTES = 1 << 20
STEP_BYTES = 1 << 18
"""Bytes decompressed at a time."""
VALUE, CONTAINER, KEY, ESCAPE = 8, 64, 192, 1
"""Cost of decoding, in eighths of a JSON value."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.S)


class Request(web.Request):
    """A request whose body stays compressed until read, so that refused requests cost nothing."""

    ATTRS = web.Request.ATTRS | {"_plain"}
    _plain: bytes | None = None

    async def read(self) -> bytes:
        """Return the decompressed body. Raises UnsupportedMediaType, BodyTooLarge, InvalidRequest,
        and HTTPRequestEntityTooLarge.
        """
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
        """Return the body's stream, for plugins' routes; ours read a `FormReader`. Raises
        UnsupportedMediaType if compressed.
        """
        check_unpacked(self)
        return await super().multipart()


def check_unpacked(request: web.BaseRequest) -> None:
    if _window(request) is not None:
        raise UnsupportedMediaType(
            "a multipart body cannot be packed; send it without Content-Encoding"
        )


def _window(request: web.BaseRequest) -> int | None:
    """Return zlib's wbits; None if not compressed. Raises UnsupportedMediaType."""
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in WINDOWS:
        raise UnsupportedMediaType(
            f"Content-Encoding: {encoding[:40]!r} is not known here (there are: gzip, deflate)"
        )
    return WINDOWS[encoding]


def unpack(packed: bytes, window: int, max_bytes: int) -> bytes:
    """Decompress to at most `max_bytes`, and MAX_RATIO times the size. Raises BodyTooLarge,
    InvalidRequest.
    """
    limit = min(max_bytes, max(FREE_BYTES, len(packed) * MAX_RATIO))
    if window == 15 and packed[:1] and packed[0] & 0xF != 8:
        window = -15  # Some clients send deflate without zlib's header.
    unpacker = zlib.decompressobj(window)
    parts: list[bytes] = []
    size, remainder = 0, packed
    try:
        while remainder and not unpacker.eof:
            parts.append(unpacker.decompress(remainder, STEP_BYTES))
            size += len(parts[-1])
            remainder = unpacker.unconsumed_tail
            if size > limit:
                raise BodyTooLarge(
                    f"the body unpacks to more than {limit} bytes, from {len(packed)} "
                    "(--max-body-bytes)"
                )
        parts.append(unpacker.flush())  # The rest, less than one chunk.
    except zlib.error as error:
        raise InvalidRequest(f"the body cannot be unpacked: {error}") from None
    if packed and not unpacker.eof:
        raise InvalidRequest("the body cannot be unpacked: it ends too early")
    if unpacker.unused_data:
        raise InvalidRequest("the body cannot be unpacked: there is data after its end")
    return b"".join(parts)


def check_json(request: web.Request) -> None:
    """Raise UnsupportedMediaType unless the content type is JSON.

    Browsers need a preflight to send that type across sites.
    """
    content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        hint = " (curl: -H content-type:application/json)" if "urlencoded" in content_type else ""
        raise UnsupportedMediaType(
            f"Content-Type: must be application/json, got {content_type[:80] or 'none'}{hint}"
        )


def check_weight(body: bytes, limit: int) -> None:
    """Raise BodyTooLarge if JSON has more than `limit` weighted values.

    By cost, an array or object counts as 8, an object's key as 24, eight escapes as 1. Bodies are
    scanned in detail only if a quick count does not suffice.
    """
    if _weight(body) <= limit * VALUE:
        return
    weight, end, number = 0, 0, 0
    for number, text in enumerate(_STRING.finditer(body)):
        start, stop = text.span()
        weight += _weight(body[end:start]) + ESCAPE * body.count(b"\\", start, stop)
        end = stop
        # Each text but the first has a comma or a colon before it, unless it is no JSON at all.
        if weight > limit * VALUE or number > limit:
            break
    if max(weight + _weight(body[end:]), number * VALUE) > limit * VALUE:
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
