"""GET /load: how many requests for work are under way, for load balancers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from ...core.remote.client import RemoteEngine
from ..batch.local import URLS
from ..fronts.counts import FrontCounts
from .context import reply

COUNTED = frozenset(URLS) | {"/v1/messages"}


class Load:
    """Requests to the routes in COUNTED."""

    count = 0
    """Those whose answer has not ended."""
    seen = 0
    """All that came."""

    async def total(self) -> int:
        """`count` of the whole server."""
        return self.count


class SharedLoad(Load):
    """Of one of several processes; the total is asked of the engine, which asks all of them."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine
        engine.count_load = lambda: self.count
        engine.metrics.registry.register(FrontCounts(engine.front, lambda: self.seen))

    async def total(self) -> int:
        return await self._engine.server_load()


def load_before(engine: AsyncEngine) -> Load:
    """To count the requests of the process that talks to this engine."""
    return SharedLoad(engine) if isinstance(engine, RemoteEngine) else Load()


LOAD: web.AppKey[Load] = web.AppKey("load", Load)


def is_for_work(request: web.Request) -> bool:
    """Whether it asks for what the model does."""
    resource = request.match_info.route.resource
    return request.method == "POST" and resource is not None and resource.canonical in COUNTED


@web.middleware
async def count_load(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A streamed answer counts until its last event."""
    if not is_for_work(request):
        return await handler(request)
    load = request.app[LOAD]
    load.count += 1
    load.seen += 1
    try:
        return await handler(request)
    finally:
        load.count -= 1


async def server_load(request: web.Request) -> web.Response:
    """GET /load, as vLLM has it."""
    return reply({"server_load": await request.app[LOAD].total()})


_SCHEMA = {
    "type": "object",
    "required": ["server_load"],
    "properties": {"server_load": {"type": "integer", "minimum": 0}},
}
server_load.openapi = {  # type: ignore[attr-defined]
    "tags": ["server"],
    "summary": "How many requests for work are under way",
    "responses": {
        "200": {"description": "Done", "content": {"application/json": {"schema": _SCHEMA}}}
    },
}
