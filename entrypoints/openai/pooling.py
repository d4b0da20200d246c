"""POST /pooling and POST /classify, and what the routes of vectors have in common."""

from __future__ import annotations

import base64
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import numpy as np
from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from ...core.engine.scoring import encode_all
from ...core.errors import InvalidRequest
from ...core.types import PoolingRequestOutput
from .answers import ClassifyAnswer, PoolingAnswer
from .body import decoded
from .context import ENGINE, check_model, new_id, reply
from .openapi import documented
from .pooling_protocol import ClassifyRequest, EmbeddingRequest, PoolingRequest, inputs

T = TypeVar("T")


@documented("vectors and scores", request=PoolingRequest, answer=PoolingAnswer)
async def pooling(request: web.Request) -> web.Response:
    """POST /pooling: what the model gives, whatever that is."""
    engine = request.app[ENGINE]
    asked = await decoded(request, PoolingRequest)
    model = check_model(engine, asked.model)
    check_task(engine, "/pooling", *(t for t in engine.supported_tasks if t != "generate"))
    name = new_id("pool", asked.request_id)
    outputs = await encoded(engine, await prompts_of(engine, asked), asked, name)
    data = [
        {"index": i, "object": "pooling", "data": numbers(o.outputs.data, asked.encoding_format)}
        for i, o in enumerate(outputs)
    ]
    return reply(body(name, model, data, outputs))


@documented("vectors and scores", request=ClassifyRequest, answer=ClassifyAnswer)
async def classify(request: web.Request) -> web.Response:
    """POST /classify: a probability a label."""
    engine = request.app[ENGINE]
    asked = await decoded(request, ClassifyRequest)
    model = check_model(engine, asked.model)
    check_task(engine, "/classify", "classify")
    name = new_id("classify", asked.request_id)
    outputs = await encoded(engine, inputs(asked.input), asked, name)
    settings = engine.model_config.pooling
    assert settings is not None
    data = []
    for index, output in enumerate(outputs):
        probs = output.outputs.probs
        likeliest = int(np.argmax(output.outputs.data))
        data.append(
            {
                "index": index,
                "label": settings.labels[likeliest],
                "probs": probs,
                "num_classes": len(probs),
            }
        )
    return reply(body(name, model, data, outputs))


def check_task(engine: AsyncEngine, path: str, *tasks: str) -> None:
    """Raises InvalidRequest, saying what the model does, unless it does one of `tasks`."""
    does = engine.supported_tasks
    if not set(tasks) & set(does):
        hint = "; start the server with --runner pooling" if does == ("generate",) else ""
        raise InvalidRequest(
            f"{path}: this model does not serve it, it does {', '.join(does)}{hint}", param="model"
        )


async def prompts_of(engine: AsyncEngine, asked: EmbeddingRequest) -> list[Any]:
    """From `input`, or from `messages` through the chat template."""
    if asked.messages is None:
        return list(inputs(asked.input))
    if asked.input is not None:
        raise InvalidRequest("messages: give either input or messages", param="messages")
    token_ids = await engine.tokenize_chat(
        asked.messages,
        chat_template_kwargs=asked.chat_template_kwargs,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
    )
    return [token_ids]


async def encoded(
    engine: AsyncEngine, prompts: Sequence[Any], asked: Any, name: str
) -> list[PoolingRequestOutput]:
    """All of a request's prompts, pooled as it asks."""
    work = encode_all(engine, prompts, asked.params(), **asked.options(name))
    return await naming(work, "input" if getattr(asked, "messages", None) is None else "messages")


async def naming(work: Awaitable[T], field: str) -> T:
    """Refusals of a prompt under the name that the route has for it."""
    try:
        return await work
    except InvalidRequest as error:
        if error.param != "prompt":
            raise
        raise type(error)(error.message.replace("prompt:", f"{field}:", 1), param=field) from None


def numbers(data: np.ndarray, encoding_format: str) -> Any:
    """A list, or OpenAI's base64 of little-endian float32."""
    if encoding_format == "float":
        return data.tolist()
    return base64.b64encode(data.astype("<f4", copy=False).tobytes()).decode("ascii")


def body(
    name: str, model: str, data: list[Any], outputs: Sequence[PoolingRequestOutput]
) -> dict[str, Any]:
    """OpenAI's list."""
    return {
        "id": name,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": usage_of(outputs),
    }


def usage_of(outputs: Sequence[PoolingRequestOutput]) -> dict[str, Any]:
    """In tokens."""
    total = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "prompt_tokens": total,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens for o in outputs)},
    }
