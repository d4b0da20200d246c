"""POST /invocations, SageMaker's one route: a body goes to the route whose fields it has."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec
from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import InvalidRequest
from ..http.body import check_json
from ..http.context import ENGINE
from ..http.routing import route
from .chat.routes import chat_completions
from .common.decoding import not_json
from .common.openapi import documented
from .completions.routes import completions
from .pooling.embeddings import embeddings
from .pooling.routes import classify, pooling
from .pooling.scoring import rerank, score

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
POOLED: dict[str, Handler] = {"embed": embeddings, "classify": classify}
"""Task of a pooling model → the route of single texts; of other tasks `pooling`."""


NULL = msgspec.Raw(b"null")


class InvocationRequest(msgspec.Struct):
    """POST /invocations: the fields by which a body is told; its route reads these and others."""

    messages: Any = None
    prompt: Any = None
    prompt_embeds: Any = None
    input: Any = None
    query: Any = None
    text_1: Any = None
    queries: Any = None
    data_1: Any = None


Fields: type[msgspec.Struct] = msgspec.defstruct(
    "Fields", [(name, msgspec.Raw, NULL) for name in InvocationRequest.__struct_fields__]
)
"""The same, with the values unread."""


@route("POST /invocations", inference=True)
@documented("server", request=InvocationRequest, response=dict[str, Any], event=dict[str, Any])
async def invocations(request: web.Request) -> web.StreamResponse:
    """POST /invocations: chat, completions, embeddings, classes, scores or ranks, by the fields."""
    check_json(request)
    body = (await request.read()).removeprefix(codecs.BOM_UTF8)
    try:
        fields = msgspec.json.decode(body, type=Fields)
    except msgspec.ValidationError:
        raise InvalidRequest("the body is not a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise await asyncio.to_thread(not_json, body, error) from None
    given = {name for name in Fields.__struct_fields__ if bytes(getattr(fields, name)) != b"null"}
    return await route_of(request.app[ENGINE], given)(request)


def route_of(engine: AsyncEngine, given: Collection[str]) -> Handler:
    """Return the route for a body with these fields. Raises InvalidRequest if it is of none."""
    if "query" in given:
        return rerank
    if not {"text_1", "queries", "data_1"}.isdisjoint(given):
        return score
    tasks = engine.supported_tasks
    if "generate" in tasks:
        if "messages" in given:
            return chat_completions
        if not {"prompt", "prompt_embeds"}.isdisjoint(given):
            return completions
    elif not {"input", "messages"}.isdisjoint(given):
        return next((route for task, route in POOLED.items() if task in tasks), pooling)
    raise InvalidRequest(
        "the body has the fields of no route: send messages or prompt to a model that generates, "
        "input or messages to one that pools, text_1 and text_2 or query and documents for scores "
        f"(this model does {', '.join(tasks)})"
    )
