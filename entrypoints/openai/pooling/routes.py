"""POST /pooling and POST /classify, and common helpers."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import numpy as np
from aiohttp import web

from ....core.engine.async_engine import AsyncEngine
from ....core.errors import InvalidRequest
from ....core.outputs import PoolingRequestOutput
from ...http.context import ENGINE, new_id, reply
from ...http.large_responses import in_pieces, off_loop
from ...http.model_names import model_name
from ...http.routing import route
from ...scoring import encode_all, with_field
from ..common.openapi import documented
from ..common.request_body import Call, call_of, decode_body
from ..common.response_schemas import ClassifyResponse, PoolingResponse
from .protocol import ClassifyRequest, InputFields, PoolingRequest, inputs

T = TypeVar("T")
MAX_VALUES = 1 << 23
"""Most numbers in a response: 2048 vectors of 4096."""
AT_ONCE = 512
"""Numbers encoded at once."""
BASE64_BYTES = 3 << 16
"""The same as base64: four characters per three bytes."""


@route("POST /pooling", inference=True)
@documented("vectors and scores", request=PoolingRequest, response=PoolingResponse)
async def pooling(request: web.Request) -> web.Response:
    """POST /pooling: the model's pooled data, whatever its kind."""
    params = await decode_body(request, PoolingRequest)
    return reply(await pooling_response(call_of(request), params))


async def pooling_response(call: Call, params: PoolingRequest) -> dict[str, Any]:
    engine = call.app[ENGINE]
    model = model_name(engine, params.model)
    check_task(engine, "/pooling", *(t for t in engine.supported_tasks if t != "generate"))
    name = new_id("pool", params.request_id)
    outputs = await encoded(engine, prompts_of(params), params, name)
    vectors = await encoded_numbers(outputs, params.encoding_format)
    data = [{"index": i, "object": "pooling", "data": v} for i, v in enumerate(vectors)]
    return body(name, model, data, outputs)


@route("POST /classify", inference=True)
@documented("vectors and scores", request=ClassifyRequest, response=ClassifyResponse)
async def classify(request: web.Request) -> web.Response:
    """POST /classify: one probability per label."""
    params = await decode_body(request, ClassifyRequest)
    return reply(await classify_response(call_of(request), params))


async def classify_response(call: Call, params: ClassifyRequest) -> dict[str, Any]:
    engine = call.app[ENGINE]
    model = model_name(engine, params.model)
    check_task(engine, "/classify", "classify")
    name = new_id("classify", params.request_id)
    outputs = await encoded(engine, prompts_of(params), params, name)
    settings = engine.model_config.pooling
    assert settings is not None
    probs = await encoded_numbers(outputs, "float")
    data = [
        {
            "index": index,
            "label": settings.labels[int(np.argmax(output.outputs.data))],
            "probs": probs[index],
            "num_classes": output.outputs.num_classes,
        }
        for index, output in enumerate(outputs)
    ]
    return body(name, model, data, outputs)


def check_task(engine: AsyncEngine, path: str, *tasks: str) -> None:
    """Raise InvalidRequest, naming the model's tasks, unless one of `tasks` is supported."""
    does = engine.supported_tasks
    if not set(tasks) & set(does):
        hint = "; start the server with --runner pooling" if does == ("generate",) else ""
        raise InvalidRequest(
            f"{path}: this model does not serve it, it does {', '.join(does)}{hint}", param="model"
        )


def prompts_of(request: InputFields) -> list[Any]:
    """Return the prompts from `input`, or `messages`."""
    if request.messages is None:
        return list(inputs(request.input))
    if request.input is not None:
        raise InvalidRequest("messages: give either input or messages", param="messages")
    options = {
        "chat_template_kwargs": request.chat_template_kwargs,
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
    }
    return [{"messages": request.messages, "options": options}]


async def encoded(
    engine: AsyncEngine, prompts: Sequence[Any], request: Any, name: str, *, field: str = ""
) -> list[PoolingRequestOutput]:
    """field: that of the prompts, for errors; "": input or messages, as the request has it."""
    options = {**request.options(engine, name), "max_values": MAX_VALUES}
    work = encode_all(engine, prompts, request.params(), **options)
    if not field:
        field = "input" if getattr(request, "messages", None) is None else "messages"
    return await naming(work, field)


async def naming(work: Awaitable[T], field: str) -> T:
    """Await `work`, naming the route's field in errors about a prompt or its messages."""
    try:
        return await work
    except InvalidRequest as error:
        raise with_field(error, field) from None


async def encoded_numbers(
    outputs: Sequence[PoolingRequestOutput], encoding_format: str
) -> list[Any]:
    arrays = [output.outputs.data for output in outputs]
    size = sum(array.size for array in arrays)
    return await off_loop(size, lambda: [numbers(array, encoding_format) for array in arrays])


def numbers(data: np.ndarray, encoding_format: str) -> Any:
    """Return a list (encoded if long), or OpenAI's base64 of little-endian float32."""
    if encoding_format == "float":
        at_once = max(AT_ONCE // math.prod(data.shape[1:]), 1)
        return in_pieces(data, at_once, np.ndarray.tolist)
    view = memoryview(data.astype("<f4", copy=False).tobytes())
    pieces = range(0, len(view), BASE64_BYTES)
    return b"".join(base64.b64encode(view[at : at + BASE64_BYTES]) for at in pieces).decode("ascii")


def body(
    name: str, model: str, data: list[Any], outputs: Sequence[PoolingRequestOutput]
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": usage_of(outputs),
    }


def usage_of(outputs: Sequence[PoolingRequestOutput]) -> dict[str, Any]:
    total = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "prompt_tokens": total,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens for o in outputs)},
    }
