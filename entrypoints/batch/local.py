"""Calls the server's routes without a socket: the same handlers, hence the same answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from aiohttp import web

from ...core.errors import JackfieldError, RequestFailed
from ...core.tenancy import ANYONE, Tenant
from ..openai.context import OPTIONS, error_reply
from ..openai.tenants import HEADER, tenant_header, told_tenant

logger = logging.getLogger("jackfield.server")
URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
"""What a line of a batch may ask for, where the application has it."""


class Answer(NamedTuple):
    """What a route said."""

    status: int
    body: bytes


class LocalCaller:
    """Calls routes of an application whose start-up is over.

    The application's middlewares are left out: nobody has to authenticate, and what limits clients
    does not limit a batch. Use as an async context manager.
    """

    def __init__(self, app: web.Application, urls: Iterable[str] = URLS) -> None:
        wanted = set(urls)
        self._inner = web.Application(
            middlewares=[_errors, told_tenant], client_max_size=app[OPTIONS].max_body_bytes
        )
        for key in app:
            if isinstance(key, web.AppKey):
                self._inner[key] = app[key]
        found: set[str] = set()
        for route in app.router.routes():
            if route.resource is None or route.method != "POST":
                continue
            if (path := route.resource.canonical) in wanted - found:
                self._inner.router.add_post(path, route.handler)
                found.add(path)
        self.urls = tuple(url for url in urls if url in found)
        self._runner = web.AppRunner(self._inner, handler_cancellation=True, access_log=None)

    async def __aenter__(self) -> LocalCaller:
        await self._runner.setup()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def post(self, url: str, body: bytes, tenant: Tenant = ANYONE) -> Answer:
        """POST a JSON body to one of `urls`, for a tenant. Cancelling it cancels the handler, as a
        client does that closes its connection."""
        assert self._runner.server is not None
        protocol: Any = self._runner.server()
        wire = _Wire(protocol)
        protocol.connection_made(wire)
        head = (
            f"POST {url} HTTP/1.1\r\nHost: local\r\nConnection: close\r\n"
            f"{HEADER}: {tenant_header(tenant)}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        protocol.data_received(head.encode("ascii") + body)
        try:
            await wire.closed
        finally:
            wire.close()
        head_bytes, _, answer = bytes(wire.written).partition(b"\r\n\r\n")
        if not head_bytes:
            raise RequestFailed("the request ended without an answer")
        return Answer(int(head_bytes.split(b" ", 2)[1]), answer)


class _Wire(asyncio.Transport):
    """The server's end of a connection that exists in memory alone."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self.written = bytearray()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._lose)

    def abort(self) -> None:
        self.close()

    def _lose(self) -> None:
        self._protocol.connection_lost(None)
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_reading(self) -> None:
        """Everything has been read already."""

    def resume_reading(self) -> None:
        """Everything has been read already."""

    def is_reading(self) -> bool:
        return not self._closing

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing waits in this transport."""


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Errors as the server's own middleware answers them."""
    try:
        return await handler(request)
    except JackfieldError as error:
        return error_reply(error)
    except web.HTTPException:
        raise
    except Exception:
        logger.exception("%s failed in a batch", request.path)
        return error_reply(RequestFailed("the server failed on this request"))
