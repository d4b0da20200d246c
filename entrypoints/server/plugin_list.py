"""GET /v1/plugins: registered plugins, and whether they work here.

Checking imports every plugin, which would block the event loop for seconds, so a child process does
it once: `jackfield plugins --json`.
"""

from __future__ import annotations

import asyncio
import logging
import sys

import msgspec
from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import RequestFailed
from ..http.context import ENGINE, OPTIONS, reply
from ..http.routing import add_routes, route
from ..inventory import Row, inventory
from ..openai.common.openapi import documented
from ..openai.common.response_schemas import PluginList

logger = logging.getLogger("jackfield.server")


class PluginRows:
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._rows: list[Row] | None = None

    async def rows(self) -> list[Row]:
        """Return a row per name, hook and plugin. Raises RequestFailed if the process fails."""
        async with self._lock:
            if self._rows is None:
                self._rows = await self._checked()
            return self._rows

    async def _checked(self) -> list[Row]:
        config, plugins = self._engine.config, self._engine.plugins
        disabled = [word for name in config.disable_plugins for word in ("--no-plugin", name)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "jackfield.entrypoints.cli.main", "plugins", "--json", *disabled,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:  # The client has left.
                process.kill()
        if process.returncode:
            logger.error("jackfield plugins --json ended with status %d", process.returncode)
            raise RequestFailed("the plugins could not be checked; the server's log says why")
        # What was plugged in by a program, instead of an installed package, is known here alone.
        rows = await asyncio.to_thread(inventory, plugins, check=False)
        checked = {_key(row): row for row in msgspec.json.decode(output, type=list[Row])}
        return [checked.get(_key(row), row) for row in rows]


def _key(row: Row) -> tuple[str, str, str, str]:
    return row.kind, row.name, row.distribution, row.plugin


ROWS: web.AppKey[PluginRows] = web.AppKey("plugin_rows", PluginRows)


def add_plugin_list(app: web.Application) -> None:
    app[ROWS] = PluginRows(app[ENGINE])
    add_routes(app, plugins, needs={"--enable-plugins-route": app[OPTIONS].enable_plugins_route})


@route("GET /v1/plugins")
@documented("server", response=PluginList)
async def plugins(request: web.Request) -> web.Response:
    """GET /v1/plugins: what is plugged in, if the server was started with that option."""
    return reply({"object": "list", "data": await request.app[ROWS].rows()})
