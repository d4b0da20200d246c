"""docs/reference/routes.md: every route, as the table of routes has it."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web
from markdown_table import table

from jackfield import AsyncEngine, EngineConfig
from jackfield.core.registry import Plugins
from jackfield.entrypoints.http.options import BatchOptions, ServerOptions
from jackfield.entrypoints.http.routing import ROUTES, Route
from jackfield.entrypoints.openai.common.openapi import routes as routes_of
from jackfield.entrypoints.openai.common.openapi import summary_of
from jackfield.entrypoints.server.app import make_app


def application() -> web.Application:
    """Of a server with every option that adds routes."""
    options = ServerOptions(
        enable_admin=True,
        enable_plugins_route=True,
        tokenizer_info=True,
        batches=BatchOptions(folder=Path()),
    )
    return make_app(AsyncEngine(EngineConfig(enable_lora=True), plugins=Plugins()), options)


def routes() -> str:
    app = application()
    rows: dict[tuple[str, ...], list[str]] = {}
    for method, path, handler in routes_of(app):
        info = app[ROUTES].served[method, path]
        row = (info.dialect.name, summary_of(handler), ", ".join(_notes(info)))
        rows.setdefault(row, []).append(f"`{method} {path}`")
    return "".join(
        [
            "# Routes\n\n",
            "Every route of the server. The [HTTP API](http-api.md) has their fields, and "
            "`GET /docs` of a running server those of plugins too. An error has the form of the "
            "route's dialect. *inference*: it is counted by `GET /load`, and may wait or be "
            "refused under load; *no key*: it needs none; *manages_engine*: for keys that "
            "[may change the engine](../how-to/live-operation.md); *kept state*: of several "
            "front ends, one serves it.\n\n",
            table(
                ["route", "dialect", "what", "notes"],
                [[", ".join(places), *row] for row, places in rows.items()],
            ),
        ]
    )


def _notes(info: Route) -> list[str]:
    return [
        *(f"needs `{option}`" for option in info.needs),
        *(
            note
            for note, applies in (
                ("inference", info.inference),
                ("no key", info.keyless),
                ("manages_engine", info.manages_engine),
                ("kept state", info.stateful),
            )
            if applies
        ),
    ]
