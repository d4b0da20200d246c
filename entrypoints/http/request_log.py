"""Logs of requests: an access line for each, and optionally their bodies."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import ClassVar

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.typedefs import Middleware

from ...core.engine.output_stream import OutputStream
from .log_format import REQUEST_ID, LoggedText, outputs

access = logging.getLogger("jackfield.access")
bodies = logging.getLogger("jackfield.requests")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


CLIENT_LEFT = 499
"""Logged status of a request whose client left, as in nginx."""
_STREAMS: ContextVar[list[OutputStream] | None] = ContextVar("streams", default=None)
_SEEN: web.RequestKey[tuple[float, list[OutputStream]]] = web.RequestKey("seen", tuple)
"""Arrival by `time.monotonic`, and the request's streams."""
_ID: web.RequestKey[str] = web.RequestKey("id", str)
_LEFT: web.RequestKey[bool] = web.RequestKey("left", bool)


def watched(stream: OutputStream) -> OutputStream:
    """Add a stream to the current request's, for its log line; return it."""
    if (streams := _STREAMS.get()) is not None:
        streams.append(stream)
    return stream


def watch(request: web.Request) -> None:
    """Start collecting a request's streams, in its task."""
    streams: list[OutputStream] = []
    _STREAMS.set(streams)
    request[_SEEN] = time.monotonic(), streams


def begin(request: web.Request) -> None:
    """Give a request its id, the client's or a new one, for its log lines and response."""
    request[_ID] = own_request_id(request) or uuid.uuid4().hex
    REQUEST_ID.set(request[_ID])


def id_of(request: web.BaseRequest) -> str:
    return request.get(_ID) or own_request_id(request) or uuid.uuid4().hex


def mark_left(request: web.BaseRequest) -> None:
    """Remember that the client left early."""
    request[_LEFT] = True


def has_been_left(request: web.BaseRequest) -> bool:
    return bool(request.get(_LEFT))


def client_has_left(request: web.BaseRequest) -> bool:
    """Return whether a cancelled request has lost its client."""
    transport = request.transport
    return transport is None or transport.is_closing()


class Lines(AbstractAccessLogger):
    """Logs a line per request. aiohttp logs complete responses, `log_left` the others."""

    silent: ClassVar[frozenset[str]] = frozenset()
    """Paths that get no line."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if request.path in self.silent:
            return
        if not request.get(_LEFT):  # Else it was logged already.
            request_id = response.headers.get("X-Request-Id")
            self.write(_facts(request, response.status, response.body_length, time, request_id))

    def log_left(self, request: web.BaseRequest, seconds: float) -> None:
        mark_left(request)
        if request.path in self.silent:
            return
        sent = request.writer.output_size
        self.write(_facts(request, CLIENT_LEFT, sent, seconds, own_request_id(request)))

    def write(self, facts: dict[str, object]) -> None:
        raise NotImplementedError


class JsonLines(Lines):
    """One JSON object per request, without level and logger name."""

    def write(self, facts: dict[str, object]) -> None:
        self.logger.info("%s", json.dumps(facts, ensure_ascii=True))


class TextLines(Lines):
    """One line per request, with quoted paths, so that clients cannot insert lines."""

    def write(self, facts: dict[str, object]) -> None:
        first = "-" if facts["ttft"] is None else f"{facts['ttft']:.3f} s"
        self.logger.info(
            '%s "%s %s" %s %s bytes %.3f s %s ttft %s tokens %s',
            facts["remote"] or "-",
            facts["method"],
            json.dumps(facts["path"])[1:-1],
            facts["status"],
            facts["bytes"],
            facts["seconds"],
            facts["request_id"] or "-",
            first,
            "-" if facts["tokens"] is None else facts["tokens"],
        )


KINDS: dict[str, type[Lines]] = {"text": TextLines, "json": JsonLines}


def lines_of(kind: str, without: Sequence[str] = ()) -> type[Lines] | None:
    """Return the class of an access log; None for "off". without: paths, or several with commas,
    that get no line.
    """
    if kind not in KINDS:
        return None
    paths = frozenset(path.strip() for words in without for path in words.split(","))
    return type("Lines", (KINDS[kind],), {"silent": paths})


def own_request_id(request: web.BaseRequest) -> str | None:
    """Return the client's request id, if short and printable."""
    request_id = request.headers.get("X-Request-Id", "")[:128]
    usable = request_id.isascii() and request_id.isprintable()
    return request_id if request_id and usable else None


def _facts(
    request: web.BaseRequest, status: int, sent: int, seconds: float, request_id: str | None
) -> dict[str, object]:
    start, streams = request.get(_SEEN, (0.0, ()))
    progress = [p for stream in streams if (p := stream.progress) is not None]
    first = [p.first_token for p in progress if p.first_token is not None]
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "remote": request.remote,
        "method": request.method,
        "path": request.path,
        "status": status,
        "bytes": sent,
        "seconds": round(seconds, 6),
        "request_id": request_id,
        "user_agent": request.headers.get("User-Agent"),
        "ttft": round(min(first) - start, 6) if first else None,
        "tokens": sum(p.num_tokens for p in progress) if progress else None,
    }


def set_up(kind: str, log_bodies: bool, log_outputs: bool = False) -> None:
    """Enable these loggers, independent of others' levels."""
    enabled_loggers = (access, kind != "off"), (bodies, log_bodies), (outputs, log_outputs)
    for logger, enabled in enabled_loggers:
        logger.setLevel(logging.INFO if enabled else logging.NOTSET)
    if kind == "json" and not access.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        access.addHandler(handler)
        access.propagate = False


def log_bodies(shown: LoggedText) -> Middleware:
    """Return a middleware that logs bodies."""

    @web.middleware
    async def log(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.can_read_body and request.content_type != "multipart/form-data":
            body = (await request.read()).decode("utf-8", "replace")
            bodies.info("%s %s %s", request.method, json.dumps(request.path), shown(body))
        return await handler(request)

    return log
