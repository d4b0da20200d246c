"""Guesses the route that a client meant."""

from __future__ import annotations

from aiohttp import web

from ..http.context import OPTIONS

BATCH_ROUTES = ("/v1/files", "/v1/batches")
MODEL_ROUTES = ("/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs")
"""Routes of Ollama's that change the models on disk."""


def hint(request: web.Request) -> str:
    """Return the rest of a sentence on an unknown route, "" without an idea.

    Mostly a base URL lacks `/v1`, repeats it, or is the whole route.
    """
    path = request.path.rstrip("/")
    if path.startswith(BATCH_ROUTES) and request.app[OPTIONS].batches is None:
        return " (the server was started without --batch-dir)"
    if path.startswith(MODEL_ROUTES):
        return " (this server has one model; jackfield pull fetches others)"
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
