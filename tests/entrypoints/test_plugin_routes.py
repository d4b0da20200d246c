"""Routes and middlewares that plugins add, beside the server's own."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from aiohttp import web
from serving import engine_config, running, save_random

from jackfield import AsyncEngine, hookimpl
from jackfield.core.errors import PluginError
from jackfield.core.registry import Plugins, Provenance, load_plugins
from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.server.app import make_app


async def mine(request: web.Request) -> web.Response:
    """GET /mine: mine."""
    return web.Response(text="mine")


async def other(request: web.Request) -> web.Response:
    return web.Response(text="other")


async def instead(request: web.Request) -> web.Response:
    return web.Response(text="instead")


instead.override = True  # type: ignore[attr-defined]


class Good:
    @hookimpl
    def register_routes(self, app: web.Application) -> None:
        app.router.add_get("/mine", mine)


def routes_of(*paths: tuple[str, str, Any], fail: bool = False) -> object:
    """A plugin that adds these, and then raises or not."""

    class Routes:
        @hookimpl
        def register_routes(self, app: web.Application, engine: Any) -> None:
            @web.middleware
            async def broken(request: web.Request, handler: Any) -> Any:
                raise RuntimeError("a middleware that should not be here")

            for method, path, handler in paths:
                app.router.add_route(method, path, handler)
            if fail:
                app["mine"] = 1
                app.middlewares.append(broken)
                app.on_response_prepare.append(broken)
                raise RuntimeError("bang")

    return Routes()


def plugins_of(*others: object) -> Plugins:
    """With `Good` first and last, as installed distributions bad0, bad1, … between."""
    plugins = load_plugins()
    plugins.add_plugin(Good(), Provenance("good", "1.0", "good"))
    for number, plugin in enumerate(others):
        plugins.add_plugin(plugin, Provenance(f"bad{number}", "2.0", "point"))
    return plugins


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_random(tmp_path_factory.mktemp("routes"))


def test_a_hook_that_raises_adds_nothing_and_is_named(
    checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    late = routes_of(("GET", "/late", other))
    plugins = plugins_of(routes_of(("GET", "/half", other), ("POST", "/mine", other), fail=True))
    plugins.add_plugin(late, Provenance("late", "1.0", "late"))
    with running(engine_config(checkpoint), plugins=plugins) as server:
        assert httpx.get(f"{server.url}/mine").text == "mine"
        assert httpx.post(f"{server.url}/mine").status_code == 405
        assert httpx.get(f"{server.url}/late").text == "other"
        assert httpx.get(f"{server.url}/half").status_code == 404
        assert httpx.get(f"{server.url}/v1/models").status_code == 200
    assert "plugin point of bad0 2.0 failed in register_routes, which is left out" in caplog.text
    (failed,) = plugins.failed
    assert failed.provenance.distribution == "bad0"
    assert failed.error == "register_routes: RuntimeError: bang"


HIDDEN = [
    ("GET", "/health", "GET /health is Jackfield's"),
    ("*", "/health", "is Jackfield's"),
    ("POST", "/v1/chat/completions", "POST /v1/chat/completions is Jackfield's"),
    ("GET", "/v1/models/{other}", "GET /v1/models/{name} is Jackfield's"),
    ("GET", "/v1/models/{owner}/{name}", "GET /v1/models/{name} is Jackfield's"),
    ("GET", "/mine", "GET /mine is that of good"),
    ("GET", "/openapi.json", "is Jackfield's"),
]


@pytest.mark.parametrize(("method", "path", "message"), HIDDEN)
def test_a_route_that_another_one_hides_is_refused_by_name(
    checkpoint: Any, caplog: pytest.LogCaptureFixture, method: str, path: str, message: str
) -> None:
    plugins = plugins_of(routes_of(("GET", "/new", other), (method, path, other)))
    with running(engine_config(checkpoint), plugins=plugins) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/mine").text == "mine"
        assert httpx.get(f"{server.url}/new").status_code == 404, "all of a plugin, or nothing"
    assert message in caplog.text
    assert "set override = True on the handler" in caplog.text
    assert [failed.provenance.distribution for failed in plugins.failed] == ["bad0"]


def test_a_route_beside_those_of_others_is_reached(
    checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    beside = (
        ("POST", "/health", other),  # Another method.
        ("GET", "/v1/models/special", other),  # The router asks the longer path first.
        ("GET", "/{rest:.*}", other),  # Whatever nobody else has.
    )
    plugins = plugins_of(routes_of(*beside))
    with running(engine_config(checkpoint), plugins=plugins) as server:
        assert httpx.get(f"{server.url}/health").text != "other"
        assert httpx.post(f"{server.url}/health").text == "other"
        assert httpx.get(f"{server.url}/v1/models/special").text == "other"
        assert httpx.get(f"{server.url}/anything/else").text == "other"
    assert plugins.failed == []


@pytest.mark.parametrize("path", ["/health", "/version", "/mine", "/v1/models/{name}", "/docs"])
def test_a_handler_that_says_so_takes_a_routes_place(checkpoint: Any, path: str) -> None:
    plugins = plugins_of(routes_of(("GET", path, instead)))
    with running(engine_config(checkpoint), plugins=plugins) as server:
        url = server.url + path.replace("{name}", "a")
        assert httpx.get(url).text == "instead"
        assert httpx.get(f"{server.url}/v1/models").status_code == 200
    assert plugins.failed == []


def test_a_replaced_route_still_asks_for_the_key(checkpoint: Any) -> None:
    plugins = plugins_of(routes_of(("GET", "/version", instead)))
    options = ServerOptions(api_keys=("key",))
    with running(engine_config(checkpoint), options, plugins=plugins) as server:
        assert httpx.get(f"{server.url}/version").status_code == 401


async def test_a_required_plugin_whose_hook_raises_stops_the_start(checkpoint: Any) -> None:
    plugins = plugins_of(routes_of(fail=True))
    plugins.required.add("bad0:point")
    async with AsyncEngine(engine_config(checkpoint), plugins=plugins) as engine:
        with pytest.raises(PluginError, match=r"point of bad0 2\.0 failed in register_routes"):
            make_app(engine)


def test_a_handler_that_raises_costs_its_request_and_is_named(
    checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def raising(request: web.Request) -> web.Response:
        raise RuntimeError("bang")

    plugins = plugins_of(routes_of(("GET", "/raising", raising)))
    with caplog.at_level(logging.ERROR):
        with running(engine_config(checkpoint), plugins=plugins) as server:
            response = httpx.get(f"{server.url}/raising")
            assert (response.status_code, response.json()["error"]["code"]) == (500, 500)
            assert httpx.get(f"{server.url}/mine").text == "mine"
    assert "GET /raising failed in a route of plugin point of bad0 2.0" in caplog.text


def test_a_middleware_sees_requests_behind_the_key(checkpoint: Any) -> None:
    seen = []

    class Middleware:
        @hookimpl
        def register_routes(self, app: web.Application) -> None:
            @web.middleware
            async def watch(request: web.Request, handler: Any) -> Any:
                seen.append(request.path)
                response = await handler(request)
                response.headers["X-Watched"] = "yes"
                return response

            app.middlewares.append(watch)

    plugins = plugins_of(Middleware())
    options = ServerOptions(api_keys=("key",))
    with running(engine_config(checkpoint), options, plugins=plugins) as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert seen == []
        key = {"Authorization": "Bearer key"}
        assert httpx.get(f"{server.url}/v1/models", headers=key).headers["X-Watched"] == "yes"
    assert seen == ["/v1/models"]
