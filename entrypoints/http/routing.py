"""The table of routes: what the server's parts need to know of each, said once beside its handler.

    @route("POST /v1/completions", inference=True)
    @documented("completions", request=CompletionRequest, response=CompletionResponse)
    async def completions(request): ...

    add_routes(app, completions)

Keys, rights, limits, pacing, load, forwarding, the form of errors, hints and the OpenAPI document
read the table. A plugin's route that takes the place of one has what is said of the place; others
of plugins have the defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Dialect:
    """A protocol: how its errors look."""

    name: str
    error: Any = None
    """Type of an error's body; None: OpenAI's."""
    error_body: Callable[[int, dict[str, Any]], Any] | None = None
    """(status, OpenAI's error) → body; None: OpenAI's."""


OPENAI = Dialect("OpenAI")


@dataclass(frozen=True, kw_only=True)
class Route:
    """What is said of a route."""

    places: tuple[tuple[str, str], ...] = ()
    """Methods and paths, as aiohttp takes them."""
    dialect: Dialect = OPENAI
    inference: bool = False
    """The engine computes for it: it is in GET /load, may wait or be refused under load, and
    simultaneous ones start one after another."""
    keyless: bool = False
    """It needs no key, and does not count against --max-concurrency."""
    manages_engine: bool = False
    """For tenants who may change the engine (`TenantLimits.manages_engine`)."""
    stateful: bool = False
    """The first front end serves it, and what is below it; others forward to that."""
    ends_work: bool = False
    """It counts against no tenant's limits."""
    allow_head: bool = True
    needs: tuple[str, ...] = ()
    """Options without which it is not served."""


class Routes:
    """The routes of an application by method and path (without patterns)."""

    def __init__(self) -> None:
        self.served: dict[tuple[str, str], Route] = {}
        self.absent: dict[str, str] = {}
        """Path that is not served here → why."""
        self.dialects: dict[str, Dialect] = {}
        """Path → whose it is, also below it, for errors without a route."""
        self.stateful: set[str] = set()

    def of(self, request: web.Request) -> Route:
        """Return what is said of a request's route."""
        resource = request.match_info.route.resource
        if resource is None:
            return NO_ROUTE
        method = "GET" if request.method == "HEAD" else request.method
        return self.served.get((method, resource.canonical), NO_ROUTE)

    def dialect(self, path: str) -> Dialect:
        return next((self.dialects[p] for p in _upwards(path) if p in self.dialects), OPENAI)

    def reason(self, path: str) -> str | None:
        """Return why a path is not served, if that is known."""
        return next((self.absent[p] for p in _upwards(path) if p in self.absent), None)

    def is_stateful(self, path: str) -> bool:
        return not self.stateful.isdisjoint(_upwards(path))


NO_ROUTE = Route()
ROUTES: web.AppKey[Routes] = web.AppKey("routes", Routes)


def route(*places: str, **said: Any) -> Callable[[F], F]:
    """Return a decorator that says what is so of a handler's route.

    places: "METHOD /path"; said: fields of `Route`.
    """
    info = Route(places=tuple(_place(place) for place in places), **said)

    def decorate(handler: F) -> F:
        handler.route = info  # type: ignore[attr-defined]
        return handler

    return decorate


def add_routes(
    app: web.Application, *handlers: Any, needs: Mapping[str, bool] | None = None
) -> None:
    """Serve the handlers' routes. needs: options → whether they are on; if one is off, the routes
    are known as absent instead."""
    for handler in handlers:
        add_at(app, handler, handler.route.places, needs=needs)


def add_at(
    app: web.Application,
    handler: Any,
    places: Iterable[tuple[str, str]],
    needs: Mapping[str, bool] | None = None,
) -> None:
    """Serve a handler's route at these places."""
    table = app[ROUTES]
    needs = needs or {}
    info = dataclasses.replace(handler.route, needs=tuple(needs))
    if missing := [option for option, present in needs.items() if not present]:
        for _, path in places:
            reason = f"the server was started without {' and '.join(missing)}"
            note_absent(app, path.partition("/{")[0], reason, info.dialect)
        return
    for method, path in places:
        if method == "GET":
            added = app.router.add_get(path, handler, allow_head=info.allow_head)
        else:
            added = app.router.add_route(method, path, handler)
        assert added.resource is not None
        canonical = added.resource.canonical
        table.served[method, canonical] = info
        if info.dialect is not OPENAI:
            table.dialects[canonical] = info.dialect
        if info.stateful:
            table.stateful.add(canonical)


def note_absent(app: web.Application, path: str, reason: str, dialect: Dialect = OPENAI) -> None:
    """Say why a path, and what is below it, is not served."""
    app[ROUTES].absent[path] = reason
    if dialect is not OPENAI:
        app[ROUTES].dialects[path] = dialect


def traits_of(request: web.Request) -> Route:
    return request.app[ROUTES].of(request)


def dialect_of(request: web.Request) -> Dialect:
    """Return a request's protocol, even without a matching route."""
    return request.app[ROUTES].dialect(request.path)


def _place(text: str) -> tuple[str, str]:
    method, path = text.split(" ", 1)
    return method, path


def _upwards(path: str) -> Iterator[str]:
    """Yield a path, and those that it is below."""
    path = path.rstrip("/")
    while path:
        yield path
        path = path.rpartition("/")[0]
