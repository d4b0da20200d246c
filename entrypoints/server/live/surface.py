"""What the routes of both dialects have in common: the jobs that they ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from aiohttp import web

from ....core.errors import BodyTooLarge, InvalidRequest, listed, shortened, shown
from ....core.live.engine_jobs import AskLive, LiveJob, PutTensors
from ....core.live.worker_jobs import TensorPart
from ...http.auth.tenants import tenant_of
from ...http.body import check_json
from ...http.context import ENGINE, reply
from ...openai.common.decoding import convert, parse
from ...openai.common.request_body import INLINE_BYTES

Lease: TypeAlias = float | Literal["none"]
"""Seconds; none: without end."""
T = TypeVar("T")
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


class NoOptions(msgspec.Struct):
    """Of routes that have none."""


class LeaseOption(msgspec.Struct):
    lease: Lease | None = None
    """None: the engine's default."""


async def options_of(request: web.Request, kind: type[T], *, ignores_others: bool = False) -> T:
    """Return a route's options, each from the query, as vLLM has it, or from a JSON body.

    ignores_others: a body may have other fields, of no effect.

    Raises InvalidRequest with the field's name, UnsupportedMediaType, BodyTooLarge.
    """
    names: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
    query = request.query
    fields = {
        name: _READERS[name](query, name) if name in _READERS else query[name]
        for name in names
        if name in query
    }
    body = await request.read() if request.can_read_body else b""
    if body:
        check_json(request)
        if len(body) > INLINE_BYTES:
            raise BodyTooLarge(f"the body must have at most {INLINE_BYTES} bytes here")
        for name, value in parse(body).items():
            if name in fields:
                raise InvalidRequest(
                    f"{name}: is in the query and in the body; send one of them", param=name
                )
            if not (name in names or ignores_others or value is None):
                field = shortened(name)
                raise InvalidRequest(
                    f"{field}: is no option of this route, which has {listed(names) or 'none'}",
                    param=field,
                )
            fields[name] = value
    return convert(fields, kind)


def seconds_of(lease: Lease | None, default: float) -> float | None:
    """Return a lease in seconds; None: without end."""
    if lease is None:
        return default
    return None if lease == "none" else float(lease)


def _flag(query: Any, name: str) -> bool:
    text = query[name]
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name}: must be true or false, got {shown(text)}", param=name)
    return text.lower() in ("true", "1")


def _lease(query: Any, name: str) -> Lease:
    text = query[name]
    if text == "none":
        return "none"
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(
            f"{name}: must be a number of seconds or none, got {shown(text)}", param=name
        ) from None


def _level(query: Any, name: str) -> int:
    text = query[name]
    if text not in ("1", "2"):
        raise InvalidRequest(f"{name}: must be 1 or 2, got {shown(text)}", param=name)
    return int(text)


def _texts(query: Any, name: str) -> list[str]:
    texts: list[str] = query.getall(name)
    return texts


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "clear_cache": _flag,
    "is_checkpoint_format": _flag,
    "lease": _lease,
    "level": _level,
    "reset_external": _flag,
    "reset_running_requests": _flag,
    "tags": _texts,
    "torch_empty_cache": _flag,
}
"""Name of an option → what reads it from a query; others are texts."""
