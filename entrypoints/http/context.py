"""Common to all routes: engine, options, and OpenAI's responses."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import InvalidRequest, JackfieldError
from ...core.outputs import DraftUsage, KVCompressionUsage
from ...core.text.tokenizer import Tokenizer
from .large_responses import JsonParts, encoded_parts, whole_array
from .options import ServerOptions

encoder = msgspec.json.Encoder(enc_hook=whole_array)
T = TypeVar("T")
FEW_TOKENS = 2048
"""Most tokens converted to text on the event loop."""
LARGE_BODY = 1 << 20
"""Response bytes beyond which the transport gets parts."""


ENGINE: web.AppKey[AsyncEngine] = web.AppKey("engine", AsyncEngine)
OPTIONS: web.AppKey[ServerOptions] = web.AppKey("options", ServerOptions)
DOCUMENT: web.AppKey[dict[str, Any]] = web.AppKey("document", dict)
"""The OpenAPI document, once requested."""


def reply(data: Any, status: int = 200) -> web.Response:
    return json_response(encoded_parts(data), status)


def json_response(parts: list[bytes], status: int = 200) -> web.Response:
    """Return an encoded JSON response, sent in parts if large."""
    body = b"".join(parts) if sum(map(len, parts)) <= LARGE_BODY else JsonParts(parts)
    return web.Response(body=body, status=status, content_type="application/json")


def error_body(error: JackfieldError, status: int | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's form. status: overrides the error's."""
    # A header that is quoted may have had bytes that are no text, which JSON cannot hold.
    message = error.message.encode("utf-8", "backslashreplace").decode()
    return {
        "error": {
            "message": message,
            "type": error.error_type,
            "param": error.param,
            "code": error.code if error.code is not None else status or error.status,
        }
    }


def error_reply(error: JackfieldError, status: int | None = None) -> web.Response:
    """Return an error response, with Retry-After if a retry may succeed."""
    response = reply(error_body(error, status), status or error.status)
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response


def check_completions(num_prompts: int, n: int, options: ServerOptions) -> None:
    most = options.max_completions_per_request
    if num_prompts * n > most:
        raise InvalidRequest(
            f"n: {n} for each of {num_prompts} prompts are {num_prompts * n} completions; "
            f"one request may have {most} (--max-completions-per-request)",
            param="n",
        )


def check_priority(engine: AsyncEngine, priority: int) -> None:
    """Raise InvalidRequest if the schedule policy would ignore the field."""
    if priority and engine.config.scheduling_policy == "fcfs":
        raise InvalidRequest(
            "priority: this server serves in order of arrival; start it with "
            "--scheduling-policy priority",
            param="priority",
        )


def tokenizer_of(engine: AsyncEngine) -> Tokenizer:
    """Return the tokenizer. Raises InvalidRequest without one."""
    if engine.tokenizer is None:
        raise InvalidRequest("this server runs without a tokenizer (skip_tokenizer_init)")
    return engine.tokenizer


async def in_text_threads(engine: AsyncEngine, num_tokens: int, work: Callable[[], T]) -> T:
    """Run `work` on this many tokens, on a thread if many."""
    return work() if num_tokens < FEW_TOKENS else await engine.in_text_threads(num_tokens, work)


def new_id(prefix: str, request_id: str | None = None) -> str:
    return f"{prefix}-{request_id or uuid.uuid4().hex}"


def part_id(whole: str, index: int) -> str:
    """Return an id for one of a request's prompts that no client can give."""
    return f"{whole}-{index}-{uuid.uuid4().hex}"


def draft_details(drafts: DraftUsage | None) -> dict[str, int]:
    """Return OpenAI's counts of predicted tokens: those of drafts, whoever proposed them."""
    if drafts is None:
        return {}
    return {
        "accepted_prediction_tokens": drafts.accepted_tokens,
        "rejected_prediction_tokens": drafts.rejected_tokens,
    }


NO_MEDIA: Mapping[str, int] = {}


def media_details(media: Mapping[str, int]) -> dict[str, int]:
    """Return OpenAI's counts of a prompt's tokens by modality, of which it has `audio_tokens`."""
    return {f"{modality}_tokens": count for modality, count in media.items()}


def usage(
    prompt: int,
    completion: int,
    cached: int,
    reasoning: int | None = None,
    compression: KVCompressionUsage | None = None,
    drafts: DraftUsage | None = None,
    media: Mapping[str, int] = NO_MEDIA,
) -> dict[str, Any]:
    """Return OpenAI's usage object in tokens, with `kv_cache_details` for compacted caches.

    media: modality → tokens of the prompt."""
    fields: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, **media_details(media)},
    }
    details = {} if reasoning is None else {"reasoning_tokens": reasoning}
    if details := details | draft_details(drafts):
        fields["completion_tokens_details"] = details
    if compression is not None:
        fields["kv_cache_details"] = msgspec.structs.asdict(compression)
    return fields
