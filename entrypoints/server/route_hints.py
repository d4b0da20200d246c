"""Guesses the route that a client meant."""

from __future__ import annotations

import difflib

from aiohttp import web

from ..http.routing import ROUTES

MAX_PATH = 64
"""Characters of a path that are compared with the routes'."""


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
    if routes:
        return f"; did you mean {max(routes, key=len)}?"
    paths = [
        r.canonical for r in request.app.router.resources() if isinstance(r, web.PlainResource)
    ]
    close = difflib.get_close_matches(path[:MAX_PATH], paths, 1, 0.9)
    return f"; did you mean {close[0]}?" if close else ""
