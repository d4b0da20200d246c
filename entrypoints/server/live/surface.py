"""What the routes of both dialects have in common: the jobs that they ask for."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from aiohttp import web

from ....core.errors import InvalidRequest, shown
from ....core.live.engine_jobs import LEASE_SECONDS, TAGS, AskLive, LiveJob, PutTensors
from ....core.live.worker_jobs import TensorPart
from ...http.auth.tenants import tenant_of
from ...http.context import ENGINE, reply

logger = logging.getLogger("jackfield.server")


class LiveState(msgspec.Struct):
    """How the engine is doing."""

    status: str
    is_paused: bool
    weights_version: str
    mode: str | None = None
    lease: float | None = None
    """Seconds after which the pause ends by itself; null: it does not."""


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
