"""What the routes of both dialects have in common: who may, and the jobs that they ask for."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from ....core.engine.async_engine import AsyncEngine
from ....core.errors import Forbidden, InvalidRequest, shown
from ....core.live.engine_jobs import LEASE_SECONDS, TAGS, AskLive, LiveJob, PutTensors
from ....core.live.worker_jobs import TensorPart
from ...http.auth.tenants import tenant_of
from ...http.context import ENGINE, reply

logger = logging.getLogger("jackfield.server")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LiveState(msgspec.Struct):
    """How the engine is doing."""

    status: str
    is_paused: bool
    weights_version: str
    mode: str | None = None
    lease: float | None = None
    """Seconds after which the pause ends by itself; null: it does not."""


def for_managers(handler: Handler) -> Handler:
    """Return a handler that refuses others before it reads a body."""

    @functools.wraps(handler)
    async def managed(request: web.Request) -> web.StreamResponse:
        engine_of(request)
        return await handler(request)

    return managed


def engine_of(request: web.Request) -> AsyncEngine:
    """Return the engine, for whoever may change it. Raises Forbidden."""
    tenant = tenant_of(request)
    if not tenant.limits.manages_engine:
        raise Forbidden("this key may not pause the engine or change its weights (manages_engine)")
    return request.app[ENGINE]


async def ask(request: web.Request, job: LiveJob) -> dict[str, Any]:
    answer = await request.app[ENGINE].ask_live(job)
    if not isinstance(job, AskLive | PutTensors):
        kind = type(job).__name__
        logger.info("%s by %s", kind, tenant_of(request).name or "a request without a key")
    return answer


def state(status: str, answer: dict[str, Any]) -> web.Response:
    return reply(
        LiveState(
            status, answer["is_paused"], answer["weights_version"], answer["mode"], answer["lease"]
        )
    )


def parts_of(
    names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> tuple[TensorPart, ...]:
    """Return tensors from lists. Raises InvalidRequest for unlike lengths."""
    if not len(names) == len(dtypes) == len(shapes):
        raise InvalidRequest(
            f"names: {len(names)} names, {len(dtypes)} types and {len(shapes)} shapes; each tensor "
            "has one of each",
            param="names",
        )
    return tuple(
        TensorPart(name, dtype, tuple(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    )


def flag_of(query: Any, name: str, *, default: bool) -> bool:
    text = query.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name}: must be true or false, got {shown(text)}", param=name)
    return text.lower() in ("true", "1")


def tags_of(query: Any) -> tuple[str, ...]:
    return tuple(query.getall("tags", TAGS))


def lease_of(query: Any) -> float | None:
    text = query.get("lease")
    if text is None or text == "none":
        return LEASE_SECONDS if text is None else None
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(
            f"lease: must be a number of seconds or none, got {shown(text)}", param="lease"
        ) from None
