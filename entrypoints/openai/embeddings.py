"""POST /v1/embeddings"""

from __future__ import annotations

from aiohttp import web

from .answers import EmbeddingAnswer
from .body import decoded
from .context import ENGINE, check_model, new_id, reply
from .openapi import documented
from .pooling import body, check_task, encoded, numbers, prompts_of
from .pooling_protocol import EmbeddingRequest


@documented("vectors and scores", request=EmbeddingRequest, answer=EmbeddingAnswer)
async def embeddings(request: web.Request) -> web.Response:
    """A vector for each text."""
    engine = request.app[ENGINE]
    asked = await decoded(request, EmbeddingRequest)
    model = check_model(engine, asked.model)
    check_task(engine, "/v1/embeddings", "embed")
    name = new_id("embd", asked.request_id)
    outputs = await encoded(engine, await prompts_of(engine, asked), asked, name)
    data = [
        {
            "index": index,
            "object": "embedding",
            "embedding": numbers(output.outputs.data, asked.encoding_format),
        }
        for index, output in enumerate(outputs)
    ]
    return reply(body(name, model, data, outputs))
