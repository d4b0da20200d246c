"""Stateful routes: the first front end serves them, others forward to it.

So clients of any front end find stored and background responses, files and batches. A forwarded
request passes authentication, limits and logs on arrival, then a Unix socket in a private folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import aiohttp
import yarl
from aiohttp import web
from aiohttp.typedefs import Middleware
from multidict import CIMultiDict

from ...core.errors import EngineStopped
from ..http.auth.tenants import HEADER, forwarded_tenant, route_of, tenant_header, tenant_of
from ..http.context import OPTIONS
from ..http.request_log import mark_left
from ..http.routing import ROUTES, Handler

logger = logging.getLogger("jackfield.fronts")
MAX_TENANT_BYTES = 2 << 20
"""Most bytes of the header that says whose a request is, which may name MAX_ADAPTERS adapters."""
ASK_SECONDS = 0.02
"""Seconds between checks for the first front end."""
HOP = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer",
     "proxy-authenticate", "proxy-authorization", "authorization", "x-api-key", "date", "server",
     "expect")
)  # fmt: skip
"""Headers of a single connection, or rewritten by each server."""


def serve_stateful(
    path: Path, errors: Middleware
) -> Callable[[web.Application], AsyncIterator[None]]:
    """Serve stateful routes to other front ends; for `Application.cleanup_ctx`.

    errors: the middleware for errors. Add it last.
    """

    async def context(app: web.Application) -> AsyncIterator[None]:
        inner = web.Application(
            middlewares=[errors, forwarded_tenant], client_max_size=app[OPTIONS].max_body_bytes
        )
        for key in app:
            if isinstance(key, web.AppKey):
                inner[key] = app[key]
        for route in app.router.routes():
            if route.resource is not None and app[ROUTES].is_stateful(route.resource.canonical):
                inner.router.add_route(route.method, route.resource.canonical, route.handler)
        runner = web.AppRunner(
            inner, handler_cancellation=True, access_log=None, max_field_size=MAX_TENANT_BYTES
        )
        await runner.setup()
        try:
            await web.UnixSite(runner, str(path)).start()
            yield
        finally:
            await runner.cleanup()

    return context


async def first_is_serving(path: Path) -> None:
    """Wait until the first front end serves stateful routes; others accept no connection before."""
    while True:
        try:
            _, writer = await asyncio.open_unix_connection(path)
        except OSError:
            await asyncio.sleep(ASK_SECONDS)
        else:
            writer.close()
            return


def forward_to(path: Path) -> Middleware:
    """Return a middleware that forwards stateful requests to the first front end."""

    @web.middleware
    async def forward(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not request.app[ROUTES].is_stateful(route_of(request)):
            return await handler(request)
        headers = _end_to_end(request.headers)
        headers[HEADER] = tenant_header(tenant_of(request))
        if headers.popall("Content-Encoding", None):  # The body was decompressed on arrival.
            headers.popall("Content-Length", None)
        streamed = request.content_type == "multipart/form-data"
        body = request.content if streamed else await request.read()
        # One connection per request: it closes with the client's, which aborts the request there.
        async with aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(path), force_close=True),
            timeout=aiohttp.ClientTimeout(),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            try:
                response = await session.request(
                    request.method,
                    yarl.URL(f"http://stateful{_origin_form(request)}", encoded=True),
                    headers=headers,
                    data=body or None,
                    allow_redirects=False,
                )
            except aiohttp.ClientConnectionError:
                raise EngineStopped(
                    "the process that keeps responses and files is being restarted; try again"
                ) from None
            return await _pass_on(request, response)

    return forward


async def _pass_on(request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
    """Forward a response as it arrives, until either side disconnects."""
    response = web.StreamResponse(status=upstream.status, headers=_end_to_end(upstream.headers))
    try:
        await response.prepare(request)
        async for piece in upstream.content.iter_any():
            await response.write(piece)
        await response.write_eof()
    except ConnectionError:
        mark_left(request)  # Leaving ends the request at the first front end, too.
    except aiohttp.ClientError:
        logger.warning("%s breaks off: the first front end has ended", request.path)
        if request.transport is not None:
            request.transport.abort()  # Too late for a status; it must not look complete.
    finally:
        upstream.close()
    return response


def _origin_form(request: web.Request) -> str:
    """Return a request target's path and query, from a whole URL, too."""
    target = request.raw_path
    if target.startswith("/"):
        return target
    url = yarl.URL(target, encoded=True)
    return url.raw_path_qs


def _end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    pairs = ((name, value) for name, value in headers.items() if name.lower() not in HOP)
    return CIMultiDict(pairs)
