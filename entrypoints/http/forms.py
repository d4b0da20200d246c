"""Reads forms (multipart/form-data) incrementally, bounding everything except contents.

aiohttp's reader does not bound the number of parts, or what precedes them; and it reads line by
line, so short lines block the event loop.
"""

from __future__ import annotations

import re
import urllib.parse
from typing import NamedTuple

from aiohttp import web

from ...core.errors import BodyTooLarge, InvalidRequest, shown
from .body import check_unpacked

MAX_PARTS = 64
"""Most parts of a form; the routes of speech know some 20 fields."""
MAX_PREAMBLE = 1024
"""Most bytes before the first part."""
MAX_PART_HEADERS = 8192
"""Most bytes of a part's headers."""
MAX_HEADER_LINES = 32
"""Most headers of a part."""
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))\s*(?:;|$)', re.I)
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)")
_PARAMETER = re.compile(r';\s*([\w*-]+)\s*=\s*(?:"((?:[^"\\]++|\\.)*+)"|([^;"]*))')


class Part(NamedTuple):
    name: str
    filename: str | None
    """None for a field."""


class FormReader:
    """Reads a form's parts in order: `next_part`, then `read` until its end."""

    def __init__(self, request: web.Request) -> None:
        """Raises UnsupportedMediaType for a compressed body, and InvalidRequest for other
        content.
        """
        check_unpacked(request)
        match = _BOUNDARY.search(request.headers.get("Content-Type", ""))
        if request.content_type != "multipart/form-data" or match is None:
            raise InvalidRequest("the body must be multipart/form-data, with its boundary")
        boundary = (match[1] or match[2]).encode("utf-8", "surrogateescape")
        self._delimiter = b"\r\n--" + boundary
        self._content = request.content
        self._buffer = bytearray(b"\r\n")  # The first delimiter may be the first line.
        self._num_parts = 0
        self._in_part = False

    async def next_part(self) -> Part | None:
        """Return the next part; None after the last one. Raises InvalidRequest, BodyTooLarge."""
        if self._num_parts == 0:
            if await self._take_until(self._delimiter, MAX_PREAMBLE) is None:
                raise BodyTooLarge(f"the form begins after more than {MAX_PREAMBLE} bytes")
        while self._in_part:
            await self.read()
        while len(self._buffer) < 2:
            await self._fill()
        if self._buffer.startswith(b"--"):
            return None
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise BodyTooLarge(f"the form has more than {MAX_PARTS} parts")
        # The delimiter's line ends; a part without headers has no name.
        head = await self._take_until(b"\r\n\r\n", MAX_PART_HEADERS)
        if head is None:
            raise _no_form(f"a part's headers are longer than {MAX_PART_HEADERS} bytes")
        padding, _, headers = head.decode("utf-8", "replace").partition("\r\n")
        if padding.strip(" \t"):
            raise _no_form("a delimiter's line goes on")
        self._in_part = True
        return _part(headers)

    async def read(self) -> bytes:
        """Return the next piece of the part's content, b"" at its end."""
        while self._in_part:
            end = self._buffer.find(self._delimiter)
            if end >= 0:
                self._in_part = False
                piece = bytes(self._buffer[:end])
                del self._buffer[: end + len(self._delimiter)]
                return piece
            # What may be the beginning of a delimiter stays.
            if (end := len(self._buffer) - len(self._delimiter) + 1) > 0:
                piece = bytes(self._buffer[:end])
                del self._buffer[:end]
                return piece
            await self._fill()
        return b""

    async def _take_until(self, end: bytes, most: int) -> bytes | None:
        """Remove and return the bytes before `end`, and remove `end`; None if there are more than
        `most`.
        """
        while (at := self._buffer.find(end, 0, most + len(end))) < 0:
            if len(self._buffer) >= most + len(end):
                return None
            await self._fill()
        taken = bytes(self._buffer[:at])
        del self._buffer[: at + len(end)]
        return taken

    async def _fill(self) -> None:
        data = await self._content.readany()
        if not data:
            raise _no_form("it ends too early")
        self._buffer += data


def _part(headers: str) -> Part:
    lines = headers.split("\r\n")
    if len(lines) > MAX_HEADER_LINES:
        raise _no_form(f"a part has more than {MAX_HEADER_LINES} headers")
    part: Part | None = None
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise _no_form(f"{shown(line)} is no header of a part")
        if header[1].lower() == "content-disposition":
            part = _disposition(header[2])
    if part is None:
        raise _no_form("a part has no name")
    return part


def _disposition(value: str) -> Part | None:
    """Parse `form-data; name="purpose"; filename="…"`; None without a name."""
    kind = value.partition(";")[0].strip().lower()
    parameters = {
        match[1].lower(): match[3].strip()
        if match[2] is None
        else re.sub(r"\\(.)", r"\1", match[2])
        for match in _PARAMETER.finditer(value)
    }
    if kind != "form-data" or not parameters.get("name"):
        return None
    filename = parameters.get("filename")
    if "filename*" in parameters:
        filename = urllib.parse.unquote(parameters["filename*"].split("'")[-1], errors="replace")
    return Part(parameters["name"], filename)


def _no_form(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the body is no multipart/form-data: {reason}")
