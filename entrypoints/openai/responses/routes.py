"""The routes of /v1/responses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from ....core.errors import InvalidRequest, JackfieldError, shown
from ...http.auth.tenants import tenant_of
from ...http.auth.usage import USAGE
from ...http.context import ENGINE, OPTIONS, json_response, reply
from ...http.request_log import mark_left
from ...http.routing import add_routes, route
from ...http.streaming import EventStream
from ..common.openapi import documented
from ..common.request_body import Call, decode_body
from ..common.response_schemas import InputTokensResponse
from .background import Responses
from .protocol import ResponsesRequest, renamed
from .request import ResponseCompletion

RESPONSES: web.AppKey[Responses] = web.AppKey("responses", Responses)
MAX_LISTED = 100
RESPONSE = "/v1/responses/{response_id:(?!input_tokens$)[^{}/]+}"


def add_responses(app: web.Application) -> None:
    """Add the routes, and stored and running responses."""
    app[RESPONSES] = Responses(app[OPTIONS])
    app.on_shutdown.append(app[RESPONSES].close)
    add_routes(app, create, input_tokens, retrieve, delete, cancel, input_items)


@route("POST /v1/responses", inference=True, stateful=True)
@documented("Responses", request=ResponsesRequest, response=dict[str, Any], event=dict[str, Any])
async def create(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses: respond to items, and keep the response unless `store` is false."""
    responses = request.app[RESPONSES]
    body = await decode_body(request, ResponsesRequest)
    tenant = tenant_of(request)
    owner = tenant.owner
    completion = await responses.new_completion(request.app[ENGINE], body, owner)
    if body.background:
        running = await responses.start(completion, owner)
        try:
            if body.stream:
                return await _send(request, running.follow(0))
            return reply(completion.snapshot())
        finally:
            running.count(request.app[USAGE], tenant)
    if body.stream:
        return await _send(request, responses.stream(completion, owner))
    return reply(await _full_response(responses, completion, owner))


async def responses_response(call: Call, params: ResponsesRequest) -> dict[str, Any]:
    responses, owner = call.app[RESPONSES], call.tenant.owner
    completion = await responses.new_completion(call.app[ENGINE], params, owner)
    return await _full_response(responses, completion, owner)


async def _full_response(
    responses: Responses, completion: ResponseCompletion, owner: str
) -> dict[str, Any]:
    response = await completion.full_response()
    responses.keep(completion, owner)
    return response


@route("POST /v1/responses/input_tokens", stateful=True)
@documented("Responses", request=ResponsesRequest, response=InputTokensResponse)
async def input_tokens(request: web.Request) -> web.Response:
    """POST /v1/responses/input_tokens: count the tokens of such a response's prompt."""
    body = await decode_body(request, ResponsesRequest)
    completion = await request.app[RESPONSES].new_completion(
        request.app[ENGINE], body, tenant_of(request).owner
    )
    try:
        count = await completion.job.count_prompt()
    except JackfieldError as error:
        raise renamed(error) from None
    return reply({"object": "response.input_tokens", "input_tokens": count})


@route(f"GET {RESPONSE}", stateful=True)
@documented("Responses", response=dict[str, Any], event=dict[str, Any], errors=(400, 404))
async def retrieve(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/{response_id}: its current state; with `stream`, its events again."""
    responses, id = request.app[RESPONSES], request.match_info["response_id"]
    if request.query.get("stream", "false").lower() in ("true", "1"):
        after = _number(request, "starting_after", -1, least=0)
        return await _send(request, responses.follow(id, tenant_of(request).owner, after + 1))
    return json_response([responses.body(id, tenant_of(request).owner)])


@route(f"DELETE {RESPONSE}", stateful=True)
@documented("Responses", response=dict[str, Any], errors=(400, 404))
async def delete(request: web.Request) -> web.Response:
    """DELETE /v1/responses/{response_id}: forget a kept response."""
    return reply(await request.app[RESPONSES].delete(*_named(request)))


@route(f"POST {RESPONSE}/cancel", stateful=True, ends_work=True)
@documented("Responses", response=dict[str, Any], errors=(400, 404))
async def cancel(request: web.Request) -> web.Response:
    """POST /v1/responses/{response_id}/cancel: end one that runs in the background."""
    body = await request.app[RESPONSES].cancel(*_named(request))
    return json_response([body])


@route(f"GET {RESPONSE}/input_items", stateful=True)
@documented("Responses", response=dict[str, Any], errors=(400, 404))
async def input_items(request: web.Request) -> web.Response:
    """GET /v1/responses/{response_id}/input_items: what came before its output, the newest first
    unless `order` is asc."""
    items = request.app[RESPONSES].input(*_named(request))
    limit = _number(request, "limit", 20, least=1, most=MAX_LISTED)
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order: must be asc or desc, got {shown(order)}", param="order")
    items = items if order == "asc" else items[::-1]
    after = request.query.get("after")
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequest(f"after: no item {shown(after)} in this response", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return reply(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }
    )


def _named(request: web.Request) -> tuple[str, str]:
    """Return (response id, owner)."""
    return request.match_info["response_id"], tenant_of(request).owner


def _number(
    request: web.Request, name: str, default: int, *, least: int, most: int = 1 << 31
) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise InvalidRequest(
            f"{name}: must be a number from {least} to {most}, got {text[:32]!r}", param=name
        )
    return int(text)


async def _send(request: web.Request, frames: AsyncIterator[bytes]) -> web.StreamResponse:
    """Send server-sent events after the first one, so that refused requests get their own status.
    As in OpenAI's API, no [DONE] follows.
    """
    events = EventStream(request)
    try:
        await events.write(await anext(frames, b""))
        async for piece in events.pieces(frames):
            await events.write(piece)
        await events.response.write_eof()
    except ConnectionError:
        mark_left(request)  # Leaving aborts a request in the foreground.
    finally:
        with contextlib.suppress(Exception):
            await frames.aclose()  # type: ignore[attr-defined]
    return events.response
