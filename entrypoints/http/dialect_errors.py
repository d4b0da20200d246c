"""Converts errors to the form of the protocol whose route was called."""

from __future__ import annotations

import msgspec
from aiohttp import web

from .context import encoder
from .routing import Handler, dialect_of


@web.middleware
async def in_dialect(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert errors in OpenAI's form to that of the route. Outermost, because keys, limits and
    bodies are checked before the handler.
    """
    response = await handler(request)
    if response.status < 400 or not isinstance(response, web.Response):
        return response
    convert = dialect_of(request).error_body
    if convert is None or not isinstance(response.body, bytes):
        return response
    if response.content_type == "application/json":
        body = msgspec.json.decode(response.body)
        if isinstance(body.get("error"), dict):
            response.body = encoder.encode(convert(response.status, body["error"]))
    return response
