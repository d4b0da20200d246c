"""Errors in Anthropic's shape."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ...core.errors import JackfieldError
from ..http.routing import Dialect, dialect_of
from .response_schemas import MessageError

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


def of_openai(status: int, error: dict[str, Any]) -> dict[str, Any]:
    return _body(status, error["message"], error.get("code"))


def _body(status: int, message: str, code: Any) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if code in CODES:
        error["details"] = {"error_code": code}
    return {"type": "error", "error": error}


ANTHROPIC = Dialect("Anthropic", MessageError, of_openai)


async def repeat_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request's id in the header that Anthropic's clients read."""
    if dialect_of(request) is ANTHROPIC and "X-Request-Id" in response.headers:
        response.headers["request-id"] = response.headers["X-Request-Id"]
