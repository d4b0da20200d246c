"""Errors in Ollama's shape: `{"error": text}`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from ...core.errors import JackfieldError
from ..http.context import encoder

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PATHS = frozenset(
    f"/api/{name}"
    for name in (
        "chat", "generate", "embed", "embeddings", "tags", "ps", "show", "version", "pull", "push",
        "create", "copy", "delete",
    )
)  # fmt: skip
"""Ollama's routes, those included that are not here."""


def error_body(error: JackfieldError) -> dict[str, str]:
    return {"error": error.message.encode("utf-8", "backslashreplace").decode()}


def of_ollama(request: web.Request) -> bool:
    """Return whether a request uses this protocol, even without a matching route."""
    return request.path in PATHS or request.path.startswith("/api/blobs/")


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert errors in OpenAI's form to Ollama's. Outermost, because keys, limits and bodies are
    checked before the handler.
    """
    response = await handler(request)
    if response.status < 400 or not of_ollama(request) or not isinstance(response, web.Response):
        return response
    if isinstance(response.body, bytes) and response.content_type == "application/json":
        body = msgspec.json.decode(response.body)
        if isinstance(body.get("error"), dict):
            response.body = encoder.encode({"error": body["error"]["message"]})
    return response
