"""Serves the playground and the page that tries a route: packaged files, read once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from aiohttp import web

from ..http.routing import add_at, route
from ..openai.common.openapi import internal

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; media-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Nothing inline or from other hosts. Browsers revalidate cached files."""
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
PLAYGROUND = {
    "/": "index.html",
    "/playground/playground.css": "playground.css",
    "/playground/attachments.js": "attachments.js",
    "/playground/base.js": "base.js",
    "/playground/conversations.js": "conversations.js",
    "/playground/engine.js": "engine.js",
    "/playground/markdown.js": "markdown.js",
    "/playground/playground.js": "playground.js",
    "/playground/server.js": "server.js",
}
TRY = {
    "/docs/try": "try.html",
    "/docs/try/try.css": "try.css",
    "/docs/try/try.js": "try.js",
}
"""Path → file: the page, and its resources."""


@dataclass(frozen=True)
class File:
    body: bytes
    content_type: str
    tag: str
    """ETag, from the content only."""


FILES: web.AppKey[dict[str, File]] = web.AppKey("pages", dict)


def add_page(app: web.Application, files: dict[str, str]) -> None:
    """Serve a page and its files, without a key; routes that they call need one."""
    app.setdefault(FILES, {}).update({path: _read(name) for path, name in files.items()})
    first, second, *_ = files
    paths = (first, f"{second.rpartition('/')[0]}/{{name}}")
    add_at(app, page, [("GET", path) for path in paths])


@route(keyless=True)
@internal
async def page(request: web.Request) -> web.Response:
    """A page for people, and its files."""
    file = request.app[FILES].get(request.path)
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
    content_type = TYPES[name.rpartition(".")[2]]
    return File(body, content_type, hashlib.sha256(body).hexdigest()[:32])
