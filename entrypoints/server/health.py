"""GET /health: whether the engine serves, replied to at once even if its worker is silent."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import EngineStopped
from ..http.context import ENGINE, reply
from ..http.routing import add_routes, route
from ..openai.common.openapi import documented

ANSWER_SECONDS = 0.5
"""Seconds to wait for the worker before replying without it: probes wait one."""


class Health:
    """Shares one check of an engine among requests."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._check: asyncio.Task[dict[str, str]] | None = None
        self._since = 0.0
        """Start of the running check, by `time.monotonic`."""
        self._error: EngineStopped | None = None
        """The last finished check's."""

    async def report(self) -> dict[str, Any]:
        """Return deviations, {} if none. Raises EngineStopped.

        A check may last as long as the worker may be silent (`AsyncEngine.check_health`); until
        then the previous outcome stands, with the check's duration.
        """
        if not self._engine.healthy:
            raise EngineStopped(self._engine.dead_reason or "the engine is not running")
        if self._check is None or self._check.done():
            self._since = time.monotonic()
            self._check = asyncio.create_task(self._engine.check_health())
        check = self._check
        await asyncio.wait((check,), timeout=ANSWER_SECONDS)
        if check.done():
            self._error = None
            try:
                failing = check.result()
            except EngineStopped as error:
                self._error = error
                raise
            return {"failing": failing} if failing else {}
        if self._error is not None:
            raise self._error
        return {"silent_seconds": round(time.monotonic() - self._since, 1)}

    async def close(self, _: web.Application) -> None:
        if self._check is not None:
            self._check.cancel()
            await asyncio.gather(self._check, return_exceptions=True)


HEALTH: web.AppKey[Health] = web.AppKey("health", Health)


def add_health(app: web.Application) -> None:
    checks = app[HEALTH] = Health(app[ENGINE])
    app.on_cleanup.append(checks.close)
    add_routes(app, health)


@route("GET /health", "GET /ping", "POST /ping", keyless=True)
@documented("server", errors=(503,))
async def health(request: web.Request) -> web.Response:
    """GET /health: 200 while the step loop and the worker respond.

    Of several engines, one is enough, and the body names those that do not serve. While the worker
    is silent, the body says for how long; after 30 s the status is 503.
    """
    report = await request.app[HEALTH].report()
    return reply(report) if report else web.Response()
