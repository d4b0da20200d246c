"""The routes of /api/chat, /api/generate and their siblings."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from ...core.errors import InvalidRequest, JackfieldError
from ..http.auth.tenants import tenant_of
from ..http.context import ENGINE, new_id, reply
from ..http.model_names import model_name, usable
from ..http.routing import add_routes, note_absent, route
from ..http.streaming import stream_outputs
from ..openai.common.openapi import documented, internal
from ..openai.common.request_body import decode_body
from ..openai.common.response_schemas import VersionResponse
from ..openai.pooling.routes import check_task, encoded, encoded_numbers, usage_of
from . import models
from .errors import OLLAMA
from .protocol import (
    CHAT_FIELDS,
    EMBED_FIELDS,
    EMBEDDINGS_FIELDS,
    GENERATE_FIELDS,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    ModelRequest,
    OllamaChatRequest,
    ShowRequest,
    in_own_terms,
)
from .request import Reply, new_chat_job, new_raw_job, protocol
from .response_schemas import (
    EmbeddingsResponse,
    EmbedResponse,
    GenerateResponse,
    OllamaChatResponse,
    ProcessesResponse,
    PullResponse,
    ShowResponse,
    TagsResponse,
)

PROTOCOL_VERSION = "0.33.0"
"""Version of Ollama whose protocol this is; clients refuse servers older than they need."""
FACTS: web.AppKey[models.Facts] = web.AppKey("facts", models.Facts)


def add_ollama(app: web.Application, *, root: bool) -> None:
    """root: also serve `/`, where clients look whether a server runs."""
    add_routes(
        app, chat, generate, embed, embeddings, tags, processes, show, pull, version,
    )  # fmt: skip
    if root:
        add_routes(app, running)
    for path in ("/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs"):
        note_absent(app, path, "this server has one model; jackfield pull fetches others", OLLAMA)
    app[FACTS] = models.Facts(app[ENGINE])


@route("POST /api/chat", dialect=OLLAMA, inference=True)
@documented(
    "ollama",
    request=OllamaChatRequest,
    response=OllamaChatResponse,
    event=OllamaChatResponse,
    in_lines=True,
)
async def chat(request: web.Request) -> web.StreamResponse:
    """POST /api/chat: respond to a conversation, in Ollama's protocol."""
    try:
        body = await decode_body(request, OllamaChatRequest)
        _check(body, is_empty=not body.messages)
        job = await new_chat_job(request.app[ENGINE], body)
        return await _respond(request, Reply(job, body), bool(body.messages), CHAT_FIELDS)
    except JackfieldError as error:
        raise in_own_terms(error, CHAT_FIELDS) from None


@route("POST /api/generate", dialect=OLLAMA, inference=True)
@documented(
    "ollama",
    request=GenerateRequest,
    response=GenerateResponse,
    event=GenerateResponse,
    in_lines=True,
)
async def generate(request: web.Request) -> web.StreamResponse:
    """POST /api/generate: respond to a prompt, in Ollama's protocol; `raw` completes it."""
    engine = request.app[ENGINE]
    try:
        body = await decode_body(request, GenerateRequest)
        _check(body, is_empty=not body.prompt)
        job = new_raw_job(engine, body) if body.raw else await new_chat_job(engine, body)
        return await _respond(request, Reply(job, body), bool(body.prompt), GENERATE_FIELDS)
    except JackfieldError as error:
        raise in_own_terms(error, GENERATE_FIELDS) from None


def _check(body: ModelRequest, *, is_empty: bool) -> None:
    body.check()
    if is_empty and body.unloads:
        raise InvalidRequest(
            "keep_alive: 0 would unload the model, which stays loaded until this server ends",
            param="keep_alive",
        )


async def _respond(
    request: web.Request, response: Reply, has_prompt: bool, names: dict[str, str]
) -> web.StreamResponse:
    if not has_prompt:
        return reply(response.loaded())
    if response.streams:
        outputs = await response.outputs()
        return await stream_outputs(
            request, outputs, response.encode, lambda: b"", protocol=protocol(names)
        )
    return reply(await response.full_response())


@route("POST /api/embed", dialect=OLLAMA, inference=True)
@documented("ollama", request=EmbedRequest, response=EmbedResponse)
async def embed(request: web.Request) -> web.Response:
    """POST /api/embed: a vector for each text, in Ollama's protocol."""
    start = time.monotonic_ns()
    try:
        body = await decode_body(request, EmbedRequest)
        vectors, num_tokens = await _vectors(request, body)
    except JackfieldError as error:
        raise in_own_terms(error, EMBED_FIELDS) from None
    return reply(
        {
            "model": body.model,
            "embeddings": vectors,
            "total_duration": time.monotonic_ns() - start,
            "load_duration": 0,
            "prompt_eval_count": num_tokens,
        }
    )


@route("POST /api/embeddings", dialect=OLLAMA, inference=True)
@documented("ollama", request=EmbeddingsRequest, response=EmbeddingsResponse)
async def embeddings(request: web.Request) -> web.Response:
    """POST /api/embeddings: a vector for one text, in Ollama's older form."""
    try:
        body = await decode_body(request, EmbeddingsRequest)
        vectors, _ = await _vectors(request, body)
    except JackfieldError as error:
        raise in_own_terms(error, EMBEDDINGS_FIELDS) from None
    return reply({"embedding": vectors[0] if vectors else []})


async def _vectors(
    request: web.Request, body: EmbedRequest | EmbeddingsRequest
) -> tuple[list[Any], int]:
    """Return the vectors, [] without a text, and the number of tokens."""
    body.check()
    engine = request.app[ENGINE]
    check_task(engine, request.path, "embed")
    params = body.embedding()
    if not params.input:
        return [], 0
    texts = [params.input] if isinstance(params.input, str) else params.input
    outputs = await encoded(engine, texts, params, new_id("embd"))
    return await encoded_numbers(outputs, "float"), usage_of(outputs)["prompt_tokens"]


@route("GET /api/tags", dialect=OLLAMA)
@documented("ollama", response=TagsResponse)
async def tags(request: web.Request) -> web.Response:
    """GET /api/tags: the served model names, and the adapters that may be used."""
    engine, facts = request.app[ENGINE], await _facts(request)
    base = engine.served_model_names[0]
    names = {name: "" for name in engine.served_model_names}
    adapters = usable(await engine.list_loras(), tenant_of(request))
    names |= {card.name: base for card in adapters}
    listed = [
        {
            "name": models.tagged(name),
            "model": models.tagged(name),
            "modified_at": facts.modified_at,
            "size": facts.num_bytes,
            "digest": facts.digest,
            "details": models.details(engine.model_config, facts, parent),
        }
        for name, parent in names.items()
    ]
    return reply({"models": listed})


@route("GET /api/ps", dialect=OLLAMA)
@documented("ollama", response=ProcessesResponse)
async def processes(request: web.Request) -> web.Response:
    """GET /api/ps: the served model, which stays loaded."""
    engine, facts = request.app[ENGINE], await _facts(request)
    info = engine.info
    num_bytes = (info.weight_bytes + info.kv_cache_bytes) * info.num_ranks
    loaded = [
        {
            "name": models.tagged(name),
            "model": models.tagged(name),
            "size": num_bytes,
            "digest": facts.digest,
            "details": models.details(engine.model_config, facts),
            "expires_at": models.FOREVER,
            "size_vram": 0 if info.device.startswith("cpu") else num_bytes,
            "context_length": engine.model_config.max_model_len,
        }
        for name in engine.served_model_names
    ]
    return reply({"models": loaded})


@route("POST /api/show", dialect=OLLAMA)
@documented("ollama", request=ShowRequest, response=ShowResponse)
async def show(request: web.Request) -> web.Response:
    """POST /api/show: what is known of a model."""
    engine = request.app[ENGINE]
    try:
        body = await decode_body(request, ShowRequest)
    except JackfieldError as error:
        raise in_own_terms(error, {}) from None
    facts = await _facts(request)
    return reply(
        {
            "modelfile": f"FROM {model_name(engine, body.model)}\n",
            "parameters": models.parameters(engine.model_config),
            "template": models.template(engine),
            "details": models.details(engine.model_config, facts),
            "model_info": models.model_info(engine, facts),
            "capabilities": models.capabilities(engine),
            "modified_at": facts.modified_at,
        }
    )


@route("POST /api/pull", dialect=OLLAMA)
@documented(
    "ollama",
    request=ShowRequest,
    response=PullResponse,
    event=PullResponse,
    in_lines=True,
)
async def pull(request: web.Request) -> web.Response:
    """POST /api/pull: success for a model that is served; others are not found."""
    try:
        await decode_body(request, ShowRequest)
    except JackfieldError as error:
        raise in_own_terms(error, {}) from None
    return reply({"status": "success"})


@route("GET /api/version", dialect=OLLAMA)
@documented("ollama", response=VersionResponse)
async def version(_: web.Request) -> web.Response:
    """GET /api/version: the version of Ollama whose protocol this is."""
    return reply({"version": PROTOCOL_VERSION})


@route("GET /", keyless=True)
@internal
async def running(_: web.Request) -> web.Response:
    """GET /: whether the server runs"""
    return web.Response(text="Jackfield is running")


async def _facts(request: web.Request) -> models.CheckpointFacts:
    return await request.app[FACTS].read()
