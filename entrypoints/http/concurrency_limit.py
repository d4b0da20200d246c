"""Limits the number of requests in flight."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from ...core.errors import EngineOverloaded
from .context import OPEN

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def limit_concurrency(count: int) -> Middleware:
    """Return a middleware that refuses requests while `count` others are in flight.

    A stream counts until it ends; open routes do not count.
    """
    running = 0

    @web.middleware
    async def limited(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal running
        resource = request.match_info.route.resource
        if resource is not None and resource.canonical in request.app[OPEN]:
            return await handler(request)
        if running >= count:
            raise EngineOverloaded(f"{count} requests are being answered; try again later")
        running += 1
        try:
            return await handler(request)
        finally:
            running -= 1

    return limited
