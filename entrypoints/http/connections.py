"""Client connections: number, timeouts, and responses to malformed HTTP.

A `Connection` adds limits to aiohttp's parser. Beyond the limit, the oldest connection without a
request is closed for a new one; if all have requests, the new one is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Any, Protocol, cast

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMethod, HttpProcessingError

from ...core.errors import InvalidRequest, JackfieldError, RequestFailed, TooManyConnections
from .connection_limits import MIN_BODY_RATE, ConnectionLimits
from .context import encoder, error_body, error_reply
from .descriptors import RepeatedWarning, max_connections

logger = logging.getLogger("jackfield.http")
SERVER_NAME = "jackfield"
"""`Server` header without versions of Python and aiohttp."""


class BodyTooSlow(web.RequestPayloadError):
    """A body did not arrive in time."""


class Counted(Protocol):
    """Counts as a connection: a `Connection` or `Handshake`."""

    @property
    def idle(self) -> bool:
        """Whether it has no request, and may be evicted."""

    def evict(self) -> None:
        """Close it at once."""


class Connections:
    """A server's open connections, oldest first."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.max = limits.max_connections or max_connections()
        self._open: OrderedDict[Counted, None] = OrderedDict()
        self._warning = RepeatedWarning()

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: Counted) -> bool:
        """Admit a connection, evicting an older idle one if necessary; False: refused."""
        if len(self._open) >= self.max and not self._make_room():
            self._warning.warn(
                f"a connection was refused: {self.max} are open, each with a request "
                "(--max-connections)"
            )
            return False
        self._open[connection] = None
        return True

    def _make_room(self) -> bool:
        for _ in range(len(self._open)):
            oldest = next(iter(self._open))
            if oldest.idle:
                self._warning.warn(
                    f"a connection without a request was closed: {self.max} are open "
                    "(--max-connections)"
                )
                self.remove(oldest)
                oldest.evict()
                return True
            self._open.move_to_end(oldest)  # So that the next search does not begin with it.
        return False

    def remove(self, connection: Counted) -> None:
        self._open.pop(connection, None)


class Connection(web.RequestHandler):
    """A client's connection, with timeouts and JSON errors."""

    __slots__ = ("_body", "_body_seen", "_body_timer", "_header_timer", "_open", "_send_timer")

    def __init__(self, manager: web.Server, open: Connections, **options: Any) -> None:
        super().__init__(manager, **options)
        self._open = open
        self._body: Any = None
        """The payload being received."""
        self._body_seen = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether the next request's headers are incomplete."""
        waiting = self._waiter is not None and not self._waiter.done()
        return waiting or not self._request_count

    def evict(self) -> None:
        """Close an idle connection at once: a TLS client could delay it."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not self._open.admit(self):
            self._force_close = True
            transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses of it.
            transport.write(raw_response(TooManyConnections("too many connections are open")))
            transport.close()
            return
        super().connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._open.remove(self)
        for timer in (self._header_timer, self._body_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        self._header_timer = self._body_timer = self._send_timer = self._body = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None
            self._end_broken_body()
            if self._messages:
                self._await_body(self._messages[-1][1])
        elif self._body is not None:
            if self._body.is_eof():
                self._await_body(None)
        elif data and self._header_timer is None and self.idle:
            self._await_headers()

    # ------------------------------------------------------------ headers

    def _await_headers(self) -> None:
        if seconds := self._open.limits.header_seconds:
            self._header_timer = self._loop.call_later(seconds, self._headers_late)
            if self._keepalive_handle is not None:  # It is no longer idle.
                self._keepalive_handle.cancel()
                self._keepalive_handle = None

    def _headers_late(self) -> None:
        self._header_timer = None
        if not self.idle or self.transport is None:
            return
        # Not logged, only reported to the client: browsers open connections in advance.
        error = InvalidRequest("the request's headers did not come in time")
        self.transport.write(raw_response(error, 408))
        self.force_close()

    # ------------------------------------------------------------ bodies

    def _await_body(self, payload: Any) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        self._body = None
        if payload is not None and not payload.is_eof():
            self._body, self._body_seen = payload, 0
            self._watch_body()

    def _watch_body(self) -> None:
        if seconds := self._open.limits.body_seconds:
            self._body_timer = self._loop.call_later(seconds, self._body_late)

    def _body_late(self) -> None:
        self._body_timer = None
        body, seconds = self._body, self._open.limits.body_seconds
        if body is None or body.is_eof():
            return
        num_bytes = body.total_bytes - self._body_seen
        if self._reading_paused or num_bytes >= MIN_BODY_RATE * seconds:
            self._body_seen = body.total_bytes
            self._watch_body()
            return
        body.set_exception(BodyTooSlow(f"{num_bytes} bytes in {seconds:g} seconds"))
        self._body = None
        self.close()

    def _end_broken_body(self) -> None:
        """Report a malformed body to its request.

        aiohttp queues the error after this request, which would wait forever.
        """
        if self._body is None or self._body.is_eof():
            return
        error = getattr(self._messages[-1][0], "exc", None)
        if error is None:
            return
        self._messages.pop()
        self._body.set_exception(web.RequestPayloadError(str(error)))
        self._await_body(None)
        self.close()

    # ------------------------------------------------------------ responses

    def pause_writing(self) -> None:
        super().pause_writing()
        if seconds := self._open.limits.send_seconds:
            self._send_timer = self._loop.call_later(seconds, self._send_late)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _send_late(self) -> None:
        self._send_timer = None
        if self.transport is not None:
            logger.info("a client reads nothing of its response: its connection is closed")
            self.transport.abort()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response, with OpenAI's error body for aiohttp's own refusals (an unknown
        `Expect`).
        """
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            resp = error_reply(InvalidRequest(resp.text or resp.reason), resp.status)
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Respond to malformed HTTP, or an outside failure, with OpenAI's error body."""
        super().handle_error(request, status, exc, message)  # Logs; raises if it is too late.
        error: JackfieldError
        if isinstance(exc, BadHttpMethod):
            status, error = 501, InvalidRequest("the request's method is unknown")
        elif isinstance(exc, HttpProcessingError):
            text = " ".join(str(exc.message).split())
            error = InvalidRequest(f"the request is malformed: {text}"[:400])
        else:
            error = RequestFailed("the server failed on this request")
        body = encoder.encode(error_body(error, status))
        response = web.Response(body=body, status=status, content_type="application/json")
        response.headers["Server"] = SERVER_NAME
        response.force_close()
        return response


def raw_response(error: JackfieldError, status: int | None = None) -> bytes:
    """Return a response as bytes, for connections without a request."""
    status = status or error.status
    body = encoder.encode(error_body(error, status))
    lines = [
        f"HTTP/1.1 {status} {'Request Timeout' if status == 408 else 'Service Unavailable'}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if error.retry_after is not None:
        lines.append(f"Retry-After: {error.retry_after}")
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body
