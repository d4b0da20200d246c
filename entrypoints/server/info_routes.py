"""The small routes: models, tokenize, detokenize, version, metrics."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from ... import __version__
from ...core.errors import InvalidRequest
from ...core.lora_request import AdapterCard
from ...core.tenancy import Tenant
from ..http.auth.tenants import tenant_of
from ..http.context import ENGINE, OPTIONS, in_text_threads, reply, tokenizer_of
from ..http.model_names import find_adapter, usable
from ..http.routing import route
from ..openai.common.openapi import documented
from ..openai.common.protocol import DetokenizeRequest, TokenizeRequest
from ..openai.common.request_body import decode_body
from ..openai.common.response_schemas import (
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    VersionResponse,
)

OWN_METRIC = re.compile(rb"^(# (?:HELP|TYPE) |)jackfield:", re.M)
VLLM_METRIC = re.compile(rb"(# (?:HELP|TYPE) )?vllm:")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@route("GET /v1/models")
@documented("models", response=ModelList)
async def models(request: web.Request) -> web.Response:
    """GET /v1/models: the served model names, and the adapters that may be used."""
    engine, tenant = request.app[ENGINE], tenant_of(request)
    cards = [_card(request, name) for name in engine.served_model_names]
    adapters = [
        _adapter_card(request, card, tenant) for card in usable(await engine.list_loras(), tenant)
    ]
    return reply({"object": "list", "data": cards + adapters})


@route("GET /v1/models/{name:.+}")
@documented("models", response=ModelCard, errors=(404,))
async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{name}: one of the served model names, or an adapter."""
    engine, tenant = request.app[ENGINE], tenant_of(request)
    name = request.match_info["name"]
    ref = await find_adapter(engine, name, tenant)
    if ref is None:
        return reply(_card(request, name))
    return reply(_adapter_card(request, await engine.find_adapter(ref), tenant))


def _card(request: web.Request, name: str) -> dict[str, Any]:
    engine = request.app[ENGINE]
    return {
        "id": name,
        "object": "model",
        "created": request.app[OPTIONS].started,
        "owned_by": "jackfield",
        "root": engine.config.model or engine.served_model_names[0],
        "parent": None,
        "max_model_len": engine.model_config.max_model_len,
        "input_modalities": engine.model_config.input_modalities,
    }


def _adapter_card(request: web.Request, card: AdapterCard, tenant: Tenant) -> dict[str, Any]:
    """Return an adapter's card; its path is for those alone who load adapters from anywhere."""
    shows_path = request.app[OPTIONS].enable_admin and tenant.limits.manages_adapters
    return {
        **_card(request, card.name),
        "root": card.path if shows_path else card.name,
        "parent": card.parent,
    }


@route("POST /tokenize")
@documented("tokens", request=TokenizeRequest, response=TokenizeResponse)
async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: convert a prompt, or messages, to token ids."""
    engine = request.app[ENGINE]
    body = await decode_body(request, TokenizeRequest)
    tokenizer = tokenizer_of(engine)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt: give either prompt or messages", param="prompt")
    if body.messages is not None:
        tokens = await engine.tokenize_chat(
            body.messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            mm_processor_kwargs=body.mm_processor_kwargs,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
        )
    else:
        [tokens] = await engine.tokenize_texts(
            [body.prompt or ""], add_special_tokens=body.add_special_tokens
        )

    def respond() -> web.Response:
        names = [tokenizer.token_text(t) for t in tokens] if body.return_token_strs else None
        fields = {"count": len(tokens), "max_model_len": engine.model_config.max_model_len}
        return reply({**fields, "tokens": tokens, "token_strs": names})

    return await in_text_threads(engine, len(tokens), respond)


@route("POST /detokenize")
@documented("tokens", request=DetokenizeRequest, response=DetokenizeResponse)
async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: convert token ids to text."""
    engine = request.app[ENGINE]
    body = await decode_body(request, DetokenizeRequest)
    tokenizer = tokenizer_of(engine)
    most = engine.tokenize_limit("tokens").tokens
    if len(body.tokens) > most:
        raise InvalidRequest(
            f"tokens: at most {most} at once, got {len(body.tokens)}", param="tokens"
        )

    def respond() -> web.Response:
        tokenizer.check_ids(body.tokens, param="tokens")
        return reply({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

    return await in_text_threads(engine, len(body.tokens), respond)


@route("GET /tokenizer_info")
@documented("tokens", response=dict[str, Any])
async def tokenizer_info(request: web.Request) -> web.Response:
    """GET /tokenizer_info: the tokenizer's tokens and chat templates, as in its configuration."""
    engine = request.app[ENGINE]
    tokenizer = tokenizer_of(engine)
    templates = [{"name": n, "template": t} for n, t in tokenizer.chat_templates.items()]
    one = templates[0]["template"] if len(templates) == 1 else None
    return reply(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": engine.model_config.max_model_len,
            "chat_template": one or templates or None,
            **tokenizer.special_tokens,
            "added_tokens_decoder": {
                str(id): {
                    "content": token.content,
                    "single_word": token.single_word,
                    "lstrip": token.lstrip,
                    "rstrip": token.rstrip,
                    "normalized": token.normalized,
                    "special": token.special,
                }
                for id, token in sorted(tokenizer.added_tokens.items())
            },
        }
    )


@route("GET /version")
@documented("server", response=VersionResponse)
async def version(request: web.Request) -> web.Response:
    """GET /version: Jackfield's version."""
    return reply({"version": __version__})


@route("GET /metrics", keyless=True)
@documented("server", response=str, content_type="text/plain")
async def metrics(request: web.Request) -> web.Response:
    """GET /metrics: metrics for Prometheus."""
    text = await request.app[ENGINE].render_metrics()
    text = with_prefix(text, request.app[OPTIONS].metrics_prefix)
    return web.Response(body=text, headers={"Content-Type": METRICS_TYPE})


def with_prefix(text: bytes, prefix: str) -> bytes:
    """Return metrics under vLLM's prefix or both; others than `jackfield:` stay unchanged."""
    if prefix == "jackfield":
        return text
    renamed = OWN_METRIC.sub(rb"\1vllm:", text)
    if prefix == "vllm":
        return renamed
    ours = (line for line in renamed.splitlines(keepends=True) if VLLM_METRIC.match(line))
    return text + b"".join(ours)
