"""POST /score and POST /rerank: similarity of texts."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from ....core.engine.async_engine import AsyncEngine
from ....core.text.text_threads import rough_size
from ...http.context import ENGINE, new_id, reply, tokenizer_of
from ...http.model_names import model_name
from ...http.routing import route
from ...scoring import ScoredText, score_all
from ..common.openapi import documented
from ..common.request_body import Call, call_of, decode_body
from ..common.response_schemas import RerankResponse, ScoreResponse
from .protocol import RerankRequest, ScoreRequest
from .routes import body, check_task, naming, usage_of


@route("POST /score", "POST /v1/score", inference=True)
@documented("vectors and scores", request=ScoreRequest, response=ScoreResponse)
async def score(request: web.Request) -> web.Response:
    """POST /score, /v1/score: one score per pair of texts."""
    params = await decode_body(request, ScoreRequest)
    return reply(await score_response(call_of(request), params))


async def score_response(call: Call, params: ScoreRequest) -> dict[str, Any]:
    engine = call.app[ENGINE]
    model = model_name(engine, params.model)
    _check_scores(engine, call.route)
    name = new_id("score", params.request_id)
    pairs = await _cut(engine, params.pairs(), *params.limits())
    work = score_all(
        engine,
        pairs,
        params.params(),
        template_kwargs=params.template_kwargs(),
        fields=params.names(),
        **params.options(engine, name),
    )
    outputs = await naming(work, params.names()[1])
    data = [
        {"index": index, "object": "score", "score": output.outputs.score}
        for index, output in enumerate(outputs)
    ]
    return body(name, model, data, outputs)


@route("POST /rerank", "POST /v1/rerank", "POST /v2/rerank", inference=True)
@documented("vectors and scores", request=RerankRequest, response=RerankResponse)
async def rerank(request: web.Request) -> web.Response:
    """POST /rerank, /v1/rerank, /v2/rerank: documents ranked by how well they match a query."""
    params = await decode_body(request, RerankRequest)
    return reply(await rerank_response(call_of(request), params))


async def rerank_response(call: Call, params: RerankRequest) -> dict[str, Any]:
    engine = call.app[ENGINE]
    model = model_name(engine, params.model)
    _check_scores(engine, call.route)
    texts = params.texts()
    name = new_id("rerank", params.request_id)
    query = params.query_text()
    pairs = await _cut(engine, [(query, text) for text in texts], *params.limits())
    work = score_all(
        engine,
        pairs,
        params.params(),
        template_kwargs=params.template_kwargs(),
        fields=("query", "documents"),
        **params.options(engine, name),
    )
    outputs = await naming(work, "documents")
    scores = [output.outputs.score for output in outputs]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[dict[str, Any]] = []
    for index in best[: params.top_n or None]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if params.return_documents:
            kind = "text" if isinstance(texts[index], str) else "multi_modal"
            result["document"] = {kind: texts[index]}
        results.append(result)
    return {"id": name, "model": model, "usage": usage_of(outputs), "results": results}


def _check_scores(engine: AsyncEngine, path: str) -> None:
    pooling = engine.model_config.pooling
    scores = pooling is not None and pooling.scores
    check_task(engine, path, *(engine.supported_tasks if scores else ("score",)))


async def _cut(
    engine: AsyncEngine,
    pairs: list[tuple[ScoredText, ScoredText]],
    query_tokens: int | None,
    document_tokens: int | None,
) -> list[tuple[ScoredText, ScoredText]]:
    """Truncate the texts of pairs; None: no limit. What has pictures is left as it is."""
    for place, limit in enumerate((query_tokens, document_tokens)):
        if limit is None:
            continue
        texts = list({text for pair in pairs if isinstance(text := pair[place], str)})

        def cut(texts: list[str] = texts, limit: int = limit) -> dict[str, str]:
            tokenizer = tokenizer_of(engine)
            return {text: tokenizer.first_tokens(text, limit) for text in texts}

        short = await engine.in_text_threads(rough_size(texts), cut)

        def cut_one(text: ScoredText, short: dict[str, str] = short) -> ScoredText:
            return short[text] if isinstance(text, str) else text

        pairs = [(cut_one(a), b) if place == 0 else (a, cut_one(b)) for a, b in pairs]
    return pairs
