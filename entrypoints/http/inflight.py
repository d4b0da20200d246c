"""Counts inference requests in flight, for GET /load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from .context import reply

INFERENCE_ROUTES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/embeddings",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v2/embed",
        "/invocations",
    }
)


class InFlightCounts:
    """Counts this process's requests to INFERENCE_ROUTES."""

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


def is_inference_request(request: web.Request) -> bool:
    resource = request.match_info.route.resource
    return (
        request.method == "POST" and resource is not None and resource.canonical in INFERENCE_ROUTES
    )


@web.middleware
async def count_in_flight(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Count a request until its response or stream ends."""
    if not is_inference_request(request):
        return await handler(request)
    counts = request.app[IN_FLIGHT]
    counts.running += 1
    counts.received += 1
    try:
        return await handler(request)
    finally:
        counts.running -= 1


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
