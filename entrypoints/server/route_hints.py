"""Guesses the route that a client meant."""

from __future__ import annotations

from aiohttp import web

from ..http.routing import ROUTES


def hint(request: web.Request) -> str:
    """Return the rest of a sentence on an unknown route, "" without an idea.

    Mostly a base URL lacks `/v1`, repeats it, or is the whole route.
    """
    path = request.path.rstrip("/")
    if (reason := request.app[ROUTES].reason(path)) is not None:
        return f" ({reason})"
    routes = [
        resource.canonical
        for resource in request.app.router.resources()
        if isinstance(resource, web.PlainResource)
        and len(resource.canonical) > 1
        and path.endswith(resource.canonical.removeprefix("/v1"))
    ]
    if not routes:
        return ""
    return f"; did you mean {max(routes, key=len)}?"
