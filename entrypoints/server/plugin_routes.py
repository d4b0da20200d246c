"""Routes and middlewares of plugins (`register_routes`): all of a plugin's, or none.

A plugin gets the application, and its additions are checked afterwards: a route hidden by an
earlier one is refused, unless its handler has `override = True`. If the hook raises or is refused,
the application is restored.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, MutableSequence
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.abc import AbstractView

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import PluginError
from ...core.registry import Provenance

OWNERS: web.AppKey[dict[web.AbstractRoute, Provenance]] = web.AppKey("owners", dict)
"""Plugin's route → origin."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")


def add_plugin_routes(app: web.Application, engine: AsyncEngine) -> None:
    """Call each plugin's `register_routes`. A failing one adds nothing, and is logged; PluginError
    if it is required.
    """
    app[OWNERS] = {}
    for impl in engine.plugins.implementations("register_routes"):
        # So that aiohttp does not add a plugin's route to the last existing resource.
        app.router.add_resource("/.plugin-routes")
        restore = _restorer(app)
        before = list(app.router.routes())
        try:
            engine.plugins.call(impl, app=app, engine=engine)
            routes = set(before)
            new = [route for route in app.router.routes() if route not in routes]
            for route in new:
                _take_place(app, route, before)
        except (Exception, SystemExit) as error:
            restore()
            engine.plugins.fail(impl, "register_routes", error)
            continue
        provenance = engine.plugins.source(impl)
        app[OWNERS] |= dict.fromkeys(new, provenance)


def owner(request: web.Request) -> Provenance | None:
    return request.app.get(OWNERS, {}).get(request.match_info.route)


# ---------------------------------------------------------------- routes that hide others


class _Place(NamedTuple):
    """The URL space of a route."""

    methods: frozenset[str]
    prefix: str
    """Path up to its first variable; the router tries longer prefixes first."""
    sample: str
    """A matching path."""
    pattern: re.Pattern[str]


def _place(route: web.AbstractRoute) -> _Place | None:
    """Return a route's URL space; None for static files and subapplications."""
    info = {} if route.resource is None else route.resource.get_info()
    methods = frozenset(METHODS if route.method == "*" else (route.method,))
    if (path := info.get("path")) is not None:
        return _Place(methods, path.rstrip("/") or "/", path, re.compile(re.escape(path)))
    if (pattern := info.get("pattern")) is not None:
        formatter: str = info["formatter"]
        prefix = formatter.partition("{")[0].rpartition("/")[0] or "/"
        return _Place(methods, prefix, re.sub(r"{\w+}", "0", formatter), pattern)
    return None


def _take_place(
    app: web.Application, route: web.AbstractRoute, before: list[web.AbstractRoute]
) -> None:
    """Move a new route to where it is reached. Raises PluginError if hidden by an earlier one
    without override.
    """
    place = _place(route)
    if place is None:
        return
    for earlier in before:
        other = _place(earlier)
        if other is None or not place.methods & other.methods:
            continue
        if len(other.prefix) < len(place.prefix) or not other.pattern.fullmatch(place.sample):
            continue
        if not _overrides(route.handler):
            assert route.resource is not None and earlier.resource is not None
            plugin = app[OWNERS].get(earlier)
            holder = "Jackfield's" if plugin is None else f"that of {plugin.distribution}"
            raise PluginError(
                f"{route.method} {route.resource.canonical} would never be reached: "
                f"{earlier.method} {earlier.resource.canonical} is {holder}; take another path, or "
                "set override = True on the handler to take its place"
            )
        for resources in app.router._resource_index.values():
            if route.resource in resources:
                resources.remove(route.resource)
                resources.insert(0, route.resource)


def _overrides(handler: Callable[..., Any] | type[AbstractView]) -> bool:
    return getattr(handler, "override", False) is True


# ---------------------------------------------------------------- as it was before


def _restorer(app: web.Application) -> Callable[[], None]:
    """Return a function that restores the application.

    aiohttp cannot remove routes, so its containers are copied and refilled: the application's, its
    router's with index lists, and each resource's.
    """
    saved_lists: list[tuple[Any, Any]] = []
    for holder in (app, app.router, *app.router.resources()):
        for value in vars(holder).values():
            if isinstance(value, dict | set | MutableSequence):
                saved_lists.append(
                    (value, copy.copy(value) if isinstance(value, dict) else [*value])
                )
    saved_lists += [(resources, [*resources]) for resources in app.router._resource_index.values()]

    def restore() -> None:
        for container, content in saved_lists:
            if isinstance(container, dict | set):
                container.clear()
                container.update(content)
            else:
                container[:] = content

    return restore
