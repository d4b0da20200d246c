"""Errors in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from ...core.errors import JackfieldError
from ..http.context import encoder

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ROOT = "/v1/messages"
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status → type. Other 4xx statuses give invalid_request_error, other 5xx statuses api_error."""
CODES = ("thread_unsupported_request",)
"""Codes that Anthropic's clients know."""


def error_body(error: JackfieldError) -> dict[str, Any]:
    return _body(error.status, error.message, error.code)


def _body(status: int, message: str, code: Any) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if code in CODES:
        error["details"] = {"error_code": code}
    return {"type": "error", "error": error}


def of_messages(request: web.Request) -> bool:
    """Return whether a request uses this protocol, even without a matching route."""
    return request.path == ROOT or request.path.startswith(f"{ROOT}/")


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert errors in OpenAI's form to Anthropic's. Outermost, because keys, limits and bodies
    are checked before the handler.
    """
    response = await handler(request)
    if response.status < 400 or not of_messages(request) or not isinstance(response, web.Response):
        return response
    if isinstance(response.body, bytes) and response.content_type == "application/json":
        body = msgspec.json.decode(response.body)
        if isinstance(body.get("error"), dict):
            error = body["error"]
            response.body = encoder.encode(
                _body(response.status, error["message"], error.get("code"))
            )
    return response


async def repeat_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request's id in the header that Anthropic's clients read."""
    if of_messages(request) and "X-Request-Id" in response.headers:
        response.headers["request-id"] = response.headers["X-Request-Id"]
