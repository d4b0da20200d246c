"""POST /score and POST /rerank: how well texts belong together."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from ...core.engine.scoring import score_all
from .answers import RerankAnswer, ScoreAnswer
from .body import decoded
from .context import ENGINE, check_model, new_id, reply
from .openapi import documented
from .pooling import body, check_task, naming, usage_of
from .pooling_protocol import RerankRequest, ScoreRequest


@documented("vectors and scores", request=ScoreRequest, answer=ScoreAnswer)
async def score(request: web.Request) -> web.Response:
    """POST /score, /v1/score: a number a pair."""
    engine = request.app[ENGINE]
    asked = await decoded(request, ScoreRequest)
    model = check_model(engine, asked.model)
    _check_scores(engine, request.path)
    name = new_id("score", asked.request_id)
    work = score_all(engine, asked.pairs(), asked.params(), **asked.options(name))
    outputs = await naming(work, "text_2")
    data = [
        {"index": index, "object": "score", "score": output.outputs.score}
        for index, output in enumerate(outputs)
    ]
    return reply(body(name, model, data, outputs))


@documented("vectors and scores", request=RerankRequest, answer=RerankAnswer)
async def rerank(request: web.Request) -> web.Response:
    """POST /rerank, /v1/rerank, /v2/rerank: documents by how well they answer a query."""
    engine = request.app[ENGINE]
    asked = await decoded(request, RerankRequest)
    model = check_model(engine, asked.model)
    _check_scores(engine, request.path)
    texts = asked.texts()
    name = new_id("rerank", asked.request_id)
    pairs = [(asked.query, text) for text in texts]
    work = score_all(engine, pairs, asked.params(), **asked.options(name))
    outputs = await naming(work, "documents")
    scores = [output.outputs.score for output in outputs]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[dict[str, Any]] = []
    for index in best[: asked.top_n or None]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if asked.return_documents:
            result["document"] = {"text": texts[index]}
        results.append(result)
    return reply({"id": name, "model": model, "usage": usage_of(outputs), "results": results})


def _check_scores(engine: AsyncEngine, path: str) -> None:
    pooling = engine.model_config.pooling
    scores = pooling is not None and pooling.scores
    check_task(engine, path, *(engine.supported_tasks if scores else ("score",)))
