"""Decodes JSON bodies into Structs, on a thread if large."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from aiohttp import web

from ....core.errors import InvalidRequest, shown
from ....core.tenancy import ReceivedRequest, Tenant
from ...http.auth.origin import Origin
from ...http.auth.tenants import TENANCY, received, route_of, tenant_of
from ...http.body import check_json, check_weight
from ...http.context import ENGINE, OPTIONS
from ...http.model_names import find_adapter
from .decoding import convert, decode, parse
from .protocol import SamplingRequest

T = TypeVar("T")
RANK_HEADER = "X-data-parallel-rank"
"""vLLM's header that selects one of several engines."""
INLINE_BYTES = 1 << 16
"""Largest bodies decoded on the event loop, fast for any content."""


class Call(NamedTuple):
    """What a response may depend on besides the body; of a request, or a batch's line."""

    app: web.Application
    route: str
    tenant: Tenant
    headers: Mapping[str, str]


def call_of(request: web.Request) -> Call:
    return Call(request.app, route_of(request), tenant_of(request), request.headers)


async def decode_body(request: web.Request, kind: type[T]) -> T:
    """Return the request's JSON body as a Struct.

    Raises UnsupportedMediaType, BodyTooLarge, and as `decode_call`.
    """
    check_json(request)
    return await decode_call(call_of(request), await request.read(), kind)


async def decode_optional_body(request: web.Request, kind: type[T]) -> T:
    """Return the request's JSON body as a Struct, or the Struct's defaults if there is none.

    Raises as `decode_body`.
    """
    return await decode_body(request, kind) if request.can_read_body else kind()


async def decode_call(call: Call, body: bytes, kind: type[T]) -> T:
    """Return a call's JSON body as a Struct, after plugins' changes.

    Raises InvalidRequest with the field's path, BodyTooLarge, plugins' refusals, and ModelNotFound.
    """
    tenancy, max_values = call.app[TENANCY], call.app[OPTIONS].max_json_values
    large = len(body) > INLINE_BYTES
    if tenancy.received:
        raw = await asyncio.to_thread(_parse_bounded, body, max_values) if large else parse(body)
        raw = await received(tenancy, ReceivedRequest(call.route, raw, call.tenant, call.headers))
        params = await asyncio.to_thread(convert, raw, kind) if large else convert(raw, kind)
    elif large:
        params = await asyncio.to_thread(lambda: convert(_parse_bounded(body, max_values), kind))
    else:
        params = decode(body, kind)
    if isinstance(params, SamplingRequest):
        params.take_defaults(call.app[OPTIONS])
    name = getattr(params, "model", None)
    tag = getattr(kind, "implied_tag", "")
    adapter = await find_adapter(call.app[ENGINE], name, call.tenant, tag)
    if hasattr(kind, "origin"):
        params.origin = Origin(  # type: ignore[attr-defined]
            call.tenant,
            _rank(call.headers.get(RANK_HEADER)),
            call.app[OPTIONS].share_prefix_cache,
            adapter,
        )
    return params


def _rank(text: str | None) -> int | None:
    """Return the header's member; the engine checks it."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidRequest(
            f"{RANK_HEADER}: must be the number of an engine (--data-parallel-size), got "
            f"{shown(text)}",
            param="data_parallel_rank",
        )
    return int(text)


def _parse_bounded(body: bytes, max_values: int) -> dict[str, Any]:
    check_weight(body, max_values)
    return parse(body)
