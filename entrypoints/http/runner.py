"""Runs an application over the server's own connections."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import hdrs, web

from ...core.errors import InvalidRequest
from .body import Request
from .connection_limits import ConnectionLimits
from .connections import SERVER_NAME, Connection, Connections
from .context import error_reply
from .tls_handshake import Handshake

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def _without_odd_expectations(handler: Handler) -> Handler:
    """Return a handler that refuses an `Expect` that aiohttp would quote but cannot encode."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get(hdrs.EXPECT, "").isascii():
            return await handler(request)
        response = error_reply(InvalidRequest("Expect: must be 100-continue"), 417)
        response.headers["Server"] = SERVER_NAME
        return response

    return handle


class _Server(web.Server):
    def __init__(
        self,
        app: web.Application,
        server: web.Server,
        open: Connections,
        tls: ssl.SSLContext | None,
        **options: Any,
    ) -> None:
        factory = functools.partial(app._make_request, _cls=Request)
        super().__init__(
            _without_odd_expectations(server.request_handler),
            request_factory=factory,
            handler_cancellation=server.handler_cancellation,
        )
        self._open = open
        self._tls = tls
        self._options = options

    def __call__(self) -> Any:
        return self._connection() if self._tls is None else self._handshake(self._tls)

    def _connection(self) -> Connection:
        return Connection(self, self._open, loop=self._loop, **self._options)

    def _handshake(self, tls: ssl.SSLContext) -> Handshake:
        return Handshake(tls, self._open, self._connection, self._loop)


class Runner(web.AppRunner):
    """Runs an application over `Connection`s and `Request`s. With `tls`, its sites listen without:
    connections begin with a `Handshake`.
    """

    __slots__ = ("_limits", "_options", "_tls", "open")

    def __init__(
        self,
        app: web.Application,
        limits: ConnectionLimits,
        *,
        tls: ssl.SSLContext | None = None,
        shutdown_timeout: float,
        **options: Any,
    ) -> None:
        super().__init__(app, handler_cancellation=True, shutdown_timeout=shutdown_timeout)
        self._limits = limits
        self._tls = tls
        self._options = options

    async def _make_server(self) -> web.Server:
        self.open = Connections(self._limits)
        return _Server(
            self.app,
            await super()._make_server(),
            self.open,
            self._tls,
            keepalive_timeout=self._limits.idle_seconds,
            auto_decompress=False,
            **self._options,
        )
