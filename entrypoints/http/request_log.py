"""Logs of requests: an access line for each, and optionally their bodies."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.typedefs import Middleware

access = logging.getLogger("jackfield.access")
bodies = logging.getLogger("jackfield.requests")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class JsonLines(AbstractAccessLogger):
    """Formats one JSON object per request, without level and logger name."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        self.logger.info("%s", json.dumps(_facts(request, response, time), ensure_ascii=True))


class TextLines(AbstractAccessLogger):
    """Formats one line per request. Paths are quoted, so that a client cannot insert lines."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        facts = _facts(request, response, time)
        self.logger.info(
            '%s "%s %s" %s %s bytes %.3f s %s',
            facts["remote"] or "-",
            facts["method"],
            json.dumps(facts["path"])[1:-1],
            facts["status"],
            facts["bytes"],
            facts["seconds"],
            facts["request_id"] or "-",
        )


KINDS: dict[str, type[AbstractAccessLogger]] = {"text": TextLines, "json": JsonLines}


def _facts(
    request: web.BaseRequest, response: web.StreamResponse, seconds: float
) -> dict[str, object]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "remote": request.remote,
        "method": request.method,
        "path": request.path,
        "status": response.status,
        "bytes": response.body_length,
        "seconds": round(seconds, 6),
        "request_id": response.headers.get("X-Request-Id"),
        "user_agent": request.headers.get("User-Agent"),
    }


def set_up(kind: str, log_bodies: bool) -> None:
    """Enable these loggers, independent of the level of the others."""
    for logger, enabled in ((access, kind != "off"), (bodies, log_bodies)):
        logger.setLevel(logging.INFO if enabled else logging.NOTSET)
    if kind == "json" and not access.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        access.addHandler(handler)
        access.propagate = False


def log_bodies(max_len: int | None) -> Middleware:
    """Return a middleware that logs bodies, truncated to `max_len` characters; None: not
    truncated."""

    @web.middleware
    async def log(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.can_read_body and request.content_type != "multipart/form-data":
            body = (await request.read()).decode("utf-8", "replace")
            excerpt = body if max_len is None else body[:max_len]
            suffix = "" if len(excerpt) == len(body) else f" … ({len(body)} characters)"
            bodies.info(
                "%s %s %s%s", request.method, json.dumps(request.path), json.dumps(excerpt), suffix
            )
        return await handler(request)

    return log
