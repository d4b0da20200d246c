"""What every route is given: the engine, the server's options, and replies in OpenAI's shapes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import InvalidRequest, JackfieldError, ModelNotFound
from ...core.text.tokenizer import Tokenizer
from .connection_limits import MAX_JSON_VALUES, ConnectionLimits
from .cors import Cors

if TYPE_CHECKING:
    from ..batch.objects import BatchOptions

encoder = msgspec.json.Encoder()
T = TypeVar("T")
FEW_TOKENS = 2048
"""Tokens that are shown as text on the event loop."""


@dataclass(frozen=True)
class ServerOptions:
    """What belongs to the server and not to the engine."""

    api_keys: tuple[str, ...] = ()
    api_key_files: tuple[Path, ...] = ()
    """With keys that have names and limits (api_keys.py)."""
    max_body_bytes: int = 32 << 20
    max_json_values: int = MAX_JSON_VALUES
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    max_stored_responses: int = 1000
    """Of /v1/responses; 0 stores none."""
    max_stored_response_bytes: int = 256 << 20
    max_completions_per_request: int = 1024
    """Of `/v1/completions` and chat: prompts times `n`."""
    shutdown_timeout: float = 60.0
    enable_plugins_route: bool = False
    """Whether `GET /v1/plugins` tells what is installed."""
    enable_admin: bool = False
    """Whether there are the routes of admin.py."""
    batches: BatchOptions | None = None
    """Where /v1/files and /v1/batches keep what they have; None: there are no such routes."""
    playground: bool = True
    """Whether `GET /` is a page for people (`entrypoints/web/`)."""
    trust_request_chat_template: bool = False
    """Whether a chat may bring its own template."""
    docs: bool = True
    """Whether `GET /openapi.json` and `GET /docs` are there."""
    root_path: str = ""
    """Where a proxy, which takes it off again, shows the server: for the OpenAPI document."""
    cors: Cors = field(default_factory=Cors)
    allowed_hosts: tuple[str, ...] | None = None
    """What a request's `Host` may be; `*` for all. None: as `sites.default_hosts` says where there
    is no key, all where there is one."""
    request_id_headers: bool = True
    """Whether answers have `X-Request-Id`."""
    max_concurrency: int | None = None
    """Requests that are answered at once; more get a 503. Open routes do not count."""
    response_role: str = "assistant"
    """Whose words the answers of chat are."""
    metrics_prefix: str = "jackfield"
    """jackfield, vllm or both."""
    access_log: str = "off"
    """off, text or json."""
    log_requests: bool = False
    """Whether bodies are logged."""
    max_log_len: int | None = None
    """Characters of a body that are logged; None: all."""
    keeps_at: Path | None = None
    """Unix socket at which to serve what is kept here to other front ends (`fronts/keeper.py`)."""
    kept_at: Path | None = None
    """Unix socket of the front end that keeps what outlives a request, if it is not this one."""
    num_fronts: int = 1
    """Processes that serve the same clients."""
    front: int = 0
    """The number of this one of them."""
    usage_at: Path | None = None
    """The file in which they count what tenants use; None: there is one process."""
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def keyed(self) -> bool:
        """Whether there are keys."""
        return bool(self.api_keys or self.api_key_files)


ENGINE: web.AppKey[AsyncEngine] = web.AppKey("engine", AsyncEngine)
OPTIONS: web.AppKey[ServerOptions] = web.AppKey("options", ServerOptions)
OPEN: web.AppKey[frozenset[str]] = web.AppKey("open", frozenset)
"""Routes served without a key."""
DOCUMENT: web.AppKey[dict[str, Any]] = web.AppKey("document", dict)
"""The OpenAPI document, once somebody asked for it."""


def reply(data: Any, status: int = 200) -> web.Response:
    """JSON, encoded by msgspec."""
    return web.Response(body=encoder.encode(data), status=status, content_type="application/json")


def error_body(error: JackfieldError, status: int | None = None) -> dict[str, Any]:
    """OpenAI's shape. status: if it is another than the error's own."""
    return {
        "error": {
            "message": error.message,
            "type": error.error_type,
            "param": error.param,
            "code": error.code if error.code is not None else status or error.status,
        }
    }


def error_reply(error: JackfieldError, status: int | None = None) -> web.Response:
    """An error as a response, with Retry-After where it may be worth to try again."""
    response = reply(error_body(error, status), status or error.status)
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response


def check_model(engine: AsyncEngine, name: str | None) -> str:
    """→ the name to answer under. Raises ModelNotFound."""
    names = engine.served_model_names
    if name is None:
        return names[0]
    if name not in names:
        raise ModelNotFound(
            f"model: {name!r} is not served here (there is: {', '.join(names)})", param="model"
        )
    return name


def check_completions(num_prompts: int, n: int, options: ServerOptions) -> None:
    """Refuse more completions than one request may start. Raises InvalidRequest."""
    most = options.max_completions_per_request
    if num_prompts * n > most:
        raise InvalidRequest(
            f"n: {n} for each of {num_prompts} prompts are {num_prompts * n} completions; one "
            f"request may ask for {most} (--max-completions-per-request)",
            param="n",
        )


def check_priority(engine: AsyncEngine, priority: int) -> None:
    """Refuse a wish that the schedule policy would not look at. Raises InvalidRequest."""
    if priority and engine.config.scheduling_policy == "fcfs":
        raise InvalidRequest(
            "priority: this server serves in order of arrival; start it with "
            "--scheduling-policy priority",
            param="priority",
        )


def tokenizer_of(engine: AsyncEngine) -> Tokenizer:
    """Raises InvalidRequest when the engine has none."""
    if engine.tokenizer is None:
        raise InvalidRequest("this server runs without a tokenizer (skip_tokenizer_init)")
    return engine.tokenizer


async def in_text_threads(engine: AsyncEngine, num_tokens: int, work: Callable[[], T]) -> T:
    """What `work` makes of so many tokens: on a thread, if they are many."""
    return work() if num_tokens < FEW_TOKENS else await engine.in_text_threads(num_tokens, work)


def new_id(prefix: str, request_id: str | None = None) -> str:
    return f"{prefix}-{request_id or uuid.uuid4().hex}"


def part_id(whole: str, index: int) -> str:
    """A name for one of the prompts of a request, that no caller can have given to another."""
    return f"{whole}-{index}-{uuid.uuid4().hex}"


def usage(
    prompt: int, completion: int, cached: int, reasoning: int | None = None
) -> dict[str, Any]:
    """OpenAI's usage object, in tokens."""
    made: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning is not None:
        made["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return made
