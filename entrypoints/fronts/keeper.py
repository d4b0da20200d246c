"""What outlives a request has one keeper: the first front end. The others forward to it.

Stored and background responses, files and batches: whichever front end a client reaches, it finds
what another one was told before. A forwarded request passes authentication, limits and logs where
it came in; the keeper gets it over a Unix socket that nobody else can reach.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import aiohttp
import yarl
from aiohttp import web
from aiohttp.typedefs import Middleware
from multidict import CIMultiDict

from ...core.errors import EngineStopped
from ..openai.context import OPTIONS
from ..openai.tenants import HEADER, tenant_header, tenant_of, told_tenant

logger = logging.getLogger("jackfield.fronts")
KEPT = ("/v1/responses", "/v1/files", "/v1/batches")
"""Routes under these."""
HOP = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer",
     "proxy-authenticate", "proxy-authorization", "authorization", "x-api-key", "date", "server",
     "expect")
)  # fmt: skip
"""Headers of one connection, and those that each server writes itself."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def is_kept(resource: web.AbstractResource | None) -> bool:
    """Whether a route is the keeper's."""
    path = "" if resource is None else resource.canonical
    return any(path == kept or path.startswith(f"{kept}/") for kept in KEPT)


def keeping(path: Path, errors: Middleware) -> Callable[[web.Application], AsyncIterator[None]]:
    """For `Application.cleanup_ctx`: serve the kept routes to other front ends, while it lasts.

    errors: the middleware that answers errors. After all that makes what these routes need.
    """

    async def context(app: web.Application) -> AsyncIterator[None]:
        inner = web.Application(
            middlewares=[errors, told_tenant], client_max_size=app[OPTIONS].max_body_bytes
        )
        for key in app:
            if isinstance(key, web.AppKey):
                inner[key] = app[key]
        for route in app.router.routes():
            if route.resource is not None and is_kept(route.resource):
                inner.router.add_route(route.method, route.resource.canonical, route.handler)
        runner = web.AppRunner(inner, handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(path)).start()
            yield
        finally:
            await runner.cleanup()

    return context


def forward_to(path: Path) -> Middleware:
    """A middleware that has the kept routes answered by the keeper."""

    @web.middleware
    async def forward(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_kept(request.match_info.route.resource):
            return await handler(request)
        headers = _end_to_end(request.headers)
        headers[HEADER] = tenant_header(tenant_of(request))
        if headers.popall("Content-Encoding", None):  # It was taken off as it came in.
            headers.popall("Content-Length", None)
        streamed = request.content_type == "multipart/form-data"
        body = request.content if streamed else await request.read()
        # A connection a request: it ends with the client's, which aborts what runs there.
        async with aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(path), force_close=True),
            timeout=aiohttp.ClientTimeout(),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            try:
                answer = await session.request(
                    request.method,
                    yarl.URL(f"http://keeper{request.raw_path}", encoded=True),
                    headers=headers,
                    data=body or None,
                    allow_redirects=False,
                )
            except aiohttp.ClientConnectionError:
                raise EngineStopped(
                    "the process that keeps responses and files is being restarted; try again"
                ) from None
            return await _pass_on(request, answer)

    return forward


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """As it comes, while both sides are there."""
    response = web.StreamResponse(status=answer.status, headers=_end_to_end(answer.headers))
    try:
        await response.prepare(request)
        async for piece in answer.content.iter_any():
            await response.write(piece)
        await response.write_eof()
    except ConnectionError:
        pass  # The client is gone; leaving ends it at the keeper, too.
    except aiohttp.ClientError:
        logger.warning("%s breaks off: the keeper has ended", request.path)
        if request.transport is not None:
            request.transport.abort()  # Too late for a status; it must not look like a whole.
    finally:
        answer.close()
    return response


def _end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    kept = ((name, value) for name, value in headers.items() if name.lower() not in HOP)
    return CIMultiDict(kept)
