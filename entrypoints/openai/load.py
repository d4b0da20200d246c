"""GET /load: how many requests for work are under way, for load balancers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from ..batch.local import URLS
from .context import reply

COUNTED = frozenset(URLS)


class Load:
    """Requests to the routes in COUNTED whose answer has not ended."""

    count = 0


LOAD: web.AppKey[Load] = web.AppKey("load", Load)


@web.middleware
async def count_load(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A streamed answer counts until its last event."""
    resource = request.match_info.route.resource
    if request.method != "POST" or resource is None or resource.canonical not in COUNTED:
        return await handler(request)
    load = request.app[LOAD]
    load.count += 1
    try:
        return await handler(request)
    finally:
        load.count -= 1


async def server_load(request: web.Request) -> web.Response:
    """GET /load, as vLLM has it."""
    return reply({"server_load": request.app[LOAD].count})


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
