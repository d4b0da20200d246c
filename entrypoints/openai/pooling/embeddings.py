"""POST /v1/embeddings"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ...http.context import ENGINE, new_id, reply
from ...http.model_names import model_name
from ...http.routing import route
from ..common.openapi import documented
from ..common.request_body import Call, call_of, decode_body
from ..common.response_schemas import EmbeddingResponse
from .protocol import EmbeddingRequest
from .routes import body, check_task, encoded, encoded_numbers, prompts_of


@route("POST /v1/embeddings", inference=True)
@documented("vectors and scores", request=EmbeddingRequest, response=EmbeddingResponse)
async def embeddings(request: web.Request) -> web.Response:
    """A vector for each text."""
    params = await decode_body(request, EmbeddingRequest)
    return reply(await embeddings_response(call_of(request), params))


async def embeddings_response(call: Call, params: EmbeddingRequest) -> dict[str, Any]:
    engine = call.app[ENGINE]
    model = model_name(engine, params.model)
    check_task(engine, "/v1/embeddings", "embed")
    name = new_id("embd", params.request_id)
    outputs = await encoded(engine, prompts_of(params), params, name)
    vectors = await encoded_numbers(outputs, params.encoding_format)
    data = [{"index": i, "object": "embedding", "embedding": v} for i, v in enumerate(vectors)]
    return body(name, model, data, outputs)
