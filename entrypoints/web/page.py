"""Serves the playground: three files that ship with the package, read once, and no others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from aiohttp import web

from ..http.context import OPEN_HANDLERS
from ..openai.common.openapi import internal

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Nothing inline, nothing from other hosts. A browser may cache a file, but revalidates it."""
TYPES = {
    "index.html": "text/html",
    "playground.css": "text/css",
    "playground.js": "text/javascript",
}


@dataclass(frozen=True)
class File:
    """One file of the page."""

    body: bytes
    content_type: str
    tag: str
    """The file's ETag, which depends on its content only."""


FILES: web.AppKey[dict[str, File]] = web.AppKey("playground", dict)


def add_page(app: web.Application) -> None:
    """Serve `/` and the two files that it names. They need no key; the routes that they call do."""
    app[FILES] = {name: _read(name) for name in TYPES}
    app[OPEN_HANDLERS].add(page)
    app.router.add_get("/", page)
    app.router.add_get("/playground/{name}", page)


@internal
async def page(request: web.Request) -> web.Response:
    """GET /, GET /playground/{name}"""
    file = request.app[FILES].get(request.match_info.get("name", "index.html"))
    if file is None:
        raise web.HTTPNotFound
    etags = request.if_none_match or ()
    if any(tag.value in (file.tag, "*") for tag in etags):
        response = web.Response(status=304, headers=HEADERS)
    else:
        response = web.Response(
            body=file.body, content_type=file.content_type, charset="utf-8", headers=HEADERS
        )
    response.etag = file.tag
    return response


def _read(name: str) -> File:
    body = resources.files(__package__).joinpath(name).read_bytes()
    return File(body, TYPES[name], hashlib.sha256(body).hexdigest()[:32])
