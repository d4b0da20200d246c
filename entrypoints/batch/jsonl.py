"""Lines of a batch's input and output, in OpenAI's format."""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...core.errors import shown
from ..http.context import encoder
from ..http.unreadable_values import unreadable_value
from .inprocess import RouteResponse

MAX_CUSTOM_ID = 512
_ID = re.compile(rb'^\{"id":"(batch_req_(\d+)_[0-9a-f]{16})"')


class LineError(NamedTuple):
    """Why a line is invalid. `code` is OpenAI's if it has one."""

    code: str
    message: str
    line: int
    """From 1."""
    param: str | None = None


class Line(NamedTuple):
    number: int
    """From 1, including empty lines."""
    id: str
    """From the line's content and number only, so a resumed run recognises it."""
    custom_id: str | None
    url: str
    body: dict[str, Any]
    error: LineError | None
    """If not None, there is no request."""


class _Request(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class LineReader:
    """Reads the input once. Blocks: not for the event loop.

    `urls`: permitted routes. `max_bytes`: limit of a line; longer ones get an error.
    """

    def __init__(self, path: Path, urls: tuple[str, ...], max_bytes: int) -> None:
        self.path = path
        self.urls = urls
        self.max_bytes = max_bytes
        self._seen: dict[bytes, int] = {}

    def __iter__(self) -> Iterator[Line]:
        self._seen.clear()
        for number, raw in self._raw_lines():
            yield self._line(number, _name(number, raw), raw)

    def ids(self) -> list[str]:
        """Return the ids of all lines without parsing them."""
        return [_name(number, raw) for number, raw in self._raw_lines()]

    def _raw_lines(self) -> Iterator[tuple[int, bytes]]:
        with self.path.open("rb") as file:
            number = 0
            while raw := file.readline(self.max_bytes + 1):
                number += 1
                if len(raw) > self.max_bytes:
                    while not raw.endswith(b"\n") and (more := file.readline(1 << 20)):
                        raw = raw[: self.max_bytes + 1] + more[-1:]
                if number == 1:
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                if raw := raw.strip():
                    yield number, raw

    def _line(self, number: int, name: str, raw: bytes) -> Line:
        custom_id: str | None = None

        def wrong(code: str, message: str, param: str | None = None) -> Line:
            error = LineError(code, f"line {number}: {message}", number, param)
            return Line(number, name, custom_id, "", {}, error)

        if len(raw) > self.max_bytes:
            return wrong("line_too_long", f"is longer than {self.max_bytes} bytes")
        try:
            decoded = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if (unread := unreadable_value(raw)) is not None:
                reason = f"{unread.path or 'line'}: {unread.reason}"
                return wrong("invalid_json_line", reason, unread.path or None)
            return wrong("invalid_json_line", f"is not JSON: {error}")
        if isinstance(decoded, dict) and isinstance(decoded.get("custom_id"), str):
            custom_id = decoded["custom_id"][:MAX_CUSTOM_ID]
        try:
            request = msgspec.convert(decoded, _Request)
        except msgspec.ValidationError as error:
            return wrong("invalid_request_line", str(error), _param(str(error)))
        if not 1 <= len(request.custom_id) <= MAX_CUSTOM_ID:
            return wrong(
                "invalid_custom_id",
                f"custom_id: needs 1 to {MAX_CUSTOM_ID} characters",
                "custom_id",
            )
        key = hashlib.blake2b(request.custom_id.encode("utf-8", "surrogatepass"), digest_size=8)
        before = self._seen.setdefault(key.digest(), number)
        if before != number:
            return wrong(
                "duplicate_custom_id",
                f"custom_id: {shown(request.custom_id)} is that of line {before} too",
                "custom_id",
            )
        if request.method != "POST":
            return wrong(
                "invalid_method", f"method: must be POST, got {shown(request.method)}", "method"
            )
        if request.url not in self.urls:
            urls = ", ".join(self.urls)
            return wrong("invalid_url", f"url: must be {urls}; got {shown(request.url)}", "url")
        for field in ("stream", "background"):
            if request.body.get(field):
                return wrong(
                    "invalid_body", f"{field}: a batch is answered in whole", f"body.{field}"
                )
        return Line(number, name, request.custom_id, request.url, request.body, None)


def _name(number: int, raw: bytes) -> str:
    return f"batch_req_{number}_{hashlib.blake2b(raw, digest_size=8).hexdigest()}"


def _param(message: str) -> str | None:
    """Return the field in msgspec's error."""
    match = re.search(r"at `\$\.([\w.]+)`|field `(\w+)`", message)
    return None if match is None else match[1] or match[2]


class Result(NamedTuple):
    line: Line
    ok: bool
    encoded: bytes
    """One line of output with its newline."""


def answered(line: Line, response: RouteResponse, request_id: str) -> Result:
    """Return the output line of a sent request. A failed one has both `error` and OpenAI's
    `response`.
    """
    ok = response.status == 200
    error = None
    body = msgspec.Raw(response.body)
    if not ok:
        details = msgspec.json.decode(response.body)["error"]
        error = {"code": str(details["code"])} | {
            name: details[name] for name in ("message", "param")
        }
    response_fields = {"status_code": response.status, "request_id": request_id, "body": body}
    return Result(line, ok, _encode(line, response_fields, error))


def refused(line: Line, code: str, message: str) -> Result:
    """Return the output line of a request that was not sent."""
    error = {"code": code, "message": message, "line": line.number}
    if line.error is not None and line.error.param is not None:
        error["param"] = line.error.param
    return Result(line, False, _encode(line, None, error))


def _encode(line: Line, response: Any, error: Any) -> bytes:
    fields = {"id": line.id, "custom_id": line.custom_id, "response": response, "error": error}
    return encoder.encode(fields) + b"\n"


def id_of(line: bytes) -> tuple[str, int] | None:
    """Return id and input line number of an output line; None if it is foreign."""
    match = _ID.match(line)
    return None if match is None else (match[1].decode("ascii"), int(match[2]))
