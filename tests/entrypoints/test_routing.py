"""The table of routes: what is said of a route beside its handler, and who reads it."""

from __future__ import annotations

import dataclasses
from typing import Any

from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from jackfield import AsyncEngine, EngineConfig, hookimpl
from jackfield.core.registry import Plugins, Provenance
from jackfield.entrypoints.http.auth.tenants import route_of
from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.http.routing import ROUTES, traits_of
from jackfield.entrypoints.openai.common.openapi import document, routes
from jackfield.entrypoints.server.app import make_app


def application(**options: Any) -> web.Application:
    return make_app(AsyncEngine(EngineConfig(), plugins=Plugins()), ServerOptions(**options))


def test_every_route_of_the_server_is_in_the_table() -> None:
    app = application(enable_admin=True, enable_plugins_route=True, tokenizer_info=True)
    assert {(method, path) for method, path, _ in routes(app)} == set(app[ROUTES].served)


def test_the_document_says_who_may_and_how_errors_look() -> None:
    paths = document(application(enable_admin=True), keys=True)["paths"]

    def responses(method: str, path: str) -> dict[str, str]:
        return {
            status: str(answer["content"]["application/json"]["schema"])
            for status, answer in paths[path][method]["responses"].items()
            if status != "200"
        }

    assert "security" not in paths["/health"]["get"]
    assert "403" in responses("post", "/sleep") and "403" not in responses("post", "/tokenize")
    for method, path, error in (
        ("post", "/v1/messages/count_tokens", "MessageError"),
        ("post", "/api/show", "OllamaError"),
        ("post", "/tokenize", "ErrorResponse"),
    ):
        for schema in responses(method, path).values():
            assert error in schema, (path, schema)


class Instead:
    """A plugin that takes the place of one route, and adds one below another."""

    @hookimpl
    def register_routes(self, app: web.Application) -> None:
        async def instead(request: web.Request) -> web.Response:
            return web.json_response(dataclasses.asdict(traits_of(request)))

        instead.override = True  # type: ignore[attr-defined]
        app.router.add_post("/v1/completions", instead)
        app.router.add_post("/v1/responses/{response_id}/more", instead)


async def test_a_plugins_route_has_what_is_said_of_its_place() -> None:
    plugins = Plugins()
    plugins.add_plugin(Instead(), Provenance("instead", "1.0", "instead"))
    app = make_app(AsyncEngine(EngineConfig(), plugins=plugins))

    async def resolved(path: str) -> web.Request:
        request = make_mocked_request("POST", path, app=app)
        request._match_info = match = await app.router.resolve(request)  # type: ignore[assignment]
        match.add_app(app)
        return request

    request = await resolved("/v1/completions")
    assert request.match_info.handler.__name__ == "instead"
    assert traits_of(request).inference
    below = route_of(await resolved("/v1/responses/resp_1/more"))
    assert app[ROUTES].is_stateful(below) and not app[ROUTES].is_stateful("/v1/models")
