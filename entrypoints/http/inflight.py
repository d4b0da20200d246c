"""Counts inference requests in flight, for GET /load."""

from __future__ import annotations

from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from .context import reply
from .routing import Handler, route, traits_of


class InFlightCounts:
    """Counts this process's inference requests."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.running = 0
        """Responses that have not ended."""
        self.received = 0
        self._core = engine.core
        self._core.report_load(lambda: self.running)

    async def server_total(self) -> int:
        """Return the number in flight in all processes."""
        return await self._core.server_load()


IN_FLIGHT: web.AppKey[InFlightCounts] = web.AppKey("in_flight", InFlightCounts)


@web.middleware
async def count_in_flight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count a request until its response or stream ends."""
    if not traits_of(request).inference:
        return await handler(request)
    counts = request.app[IN_FLIGHT]
    counts.running += 1
    counts.received += 1
    try:
        return await handler(request)
    finally:
        counts.running -= 1


@route("GET /load")
async def server_load(request: web.Request) -> web.Response:
    """GET /load, in vLLM's form."""
    return reply({"server_load": await request.app[IN_FLIGHT].server_total()})


_SCHEMA = {
    "type": "object",
    "required": ["server_load"],
    "properties": {"server_load": {"type": "integer", "minimum": 0}},
}
server_load.openapi = {  # type: ignore[attr-defined]
    "tags": ["server"],
    "summary": "How many inference requests are in flight",
    "responses": {
        "200": {"description": "Done", "content": {"application/json": {"schema": _SCHEMA}}}
    },
}
