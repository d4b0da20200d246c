"""The aiohttp application: routes, authentication, errors in OpenAI's shape."""

from __future__ import annotations

import hashlib
import hmac
import logging
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import (
    AuthenticationFailed,
    InvalidRequest,
    JackfieldError,
    RequestFailed,
)
from .chat import chat_completions
from .completions import completions
from .context import ENGINE, OPTIONS, ServerOptions, error_body, reply
from .utility import detokenize, health, metrics, model, models, tokenize, version

logger = logging.getLogger("jackfield.server")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_ROUTES = frozenset({"/health", "/ping", "/metrics"})
"""Served without a key. Decided on the route that matched, never on the path as sent."""


def make_app(engine: AsyncEngine, options: ServerOptions | None = None) -> web.Application:
    """All routes over one engine, plugins' routes last."""
    options = options or ServerOptions()
    app = web.Application(
        middlewares=[_errors, _authentication], client_max_size=options.max_body_bytes
    )
    app[ENGINE] = engine
    app[OPTIONS] = options
    app.add_routes(
        [
            web.get("/v1/models", models),
            web.get("/v1/models/{name:.+}", model),
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/health", health),
            web.get("/ping", health),
            web.post("/ping", health),
            web.get("/version", version),
            web.get("/metrics", metrics),
        ]
    )
    engine.plugins.manager.hook.register_routes(app=app, engine=engine)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as OpenAI's body, with the request's id."""
    request_id = request.headers.get("X-Request-Id", "")[:128] or uuid.uuid4().hex
    try:
        response = await handler(request)
    except JackfieldError as error:
        response = reply(error_body(error), error.status)
    except web.HTTPRequestEntityTooLarge as refused:
        response = _refusal(413, f"the body is too large: {refused.text}")
    except web.HTTPException as refused:
        response = _refusal(refused.status, f"{request.method} {request.path}: {refused.reason}")
    except (ConnectionError, TimeoutError):
        raise
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        response = reply(error_body(RequestFailed("the server failed on this request")), 500)
    if not response.prepared:
        response.headers["X-Request-Id"] = request_id
    return response


def _refusal(status: int, message: str) -> web.Response:
    """What aiohttp refused, in OpenAI's shape."""
    error = InvalidRequest(message)
    body = error_body(error)
    body["error"]["code"] = status
    return reply(body, status)


@web.middleware
async def _authentication(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A bearer key for everything but OPEN_ROUTES, compared in constant time."""
    keys = request.app[OPTIONS].api_keys
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else None
    if keys and route not in OPEN_ROUTES:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        matches = [
            hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest()) for key in keys
        ]
        if scheme.lower() != "bearer" or not any(matches):
            raise AuthenticationFailed("a valid API key is needed: Authorization: Bearer KEY")
    return await handler(request)
