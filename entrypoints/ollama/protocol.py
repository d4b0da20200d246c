"""The requests of /api/chat, /api/generate and /api/embed, and their conversion to those of chats,
completions and embeddings.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any, ClassVar, NoReturn

import msgspec

from ...core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    JackfieldError,
    ModelNotFound,
    shown,
)
from ..http.auth.origin import Origin
from ..openai.common.protocol import ChatRequest, CompletionRequest
from ..openai.common.renamed_fields import rename_field
from ..openai.pooling.protocol import EmbeddingRequest
from .messages import Message, content_of, to_messages

logger = logging.getLogger("jackfield.server")
LEVELS = ("low", "medium", "high", "max")
"""Values of `think` besides true and false."""
NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
DURATION = re.compile(rf"[+-]?(?:(?:{NUMBER}(?:ns|us|µs|ms|s|m|h))+|{NUMBER})")
"""As Go writes them, or seconds."""
PASSED = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop")
"""Options of the same meaning in chats."""
OWN = ("ignore_eos", "priority", "cache_salt", "kv_compression", "stream_interval")
"""This server's own fields, as in a chat."""
LOAD_TIME = (
    "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only",
    "use_mmap", "use_mlock", "embedding_only", "num_thread", "numa", "draft_num_predict",
    "num_keep",
)  # fmt: skip
"""Options that the server's start has decided."""
NO_EFFECT = {
    "tfs_z": (None, 1.0),
    "typical_p": (None, 1.0),
    "mirostat": (None, 0),
}
"""Samplers that are not here → values with which they do nothing."""
OPTIONS = {
    **{name: f"options.{name}" for name in (*PASSED, "seed", "top_k")},
    "repetition_penalty": "options.repeat_penalty",
    "max_tokens": "options.num_predict",
}
FORMAT = {"response_format.json_schema": "format", "response_format": "format"}
SWITCHES = {"reasoning_effort": "think", "chat_template_kwargs": "think"}
CHAT_FIELDS = {**FORMAT, **OPTIONS, **SWITCHES, "prompt": "messages"}
GENERATE_FIELDS = {**FORMAT, **OPTIONS, **SWITCHES, "messages": "prompt"}
EMBED_FIELDS = {"prompt": "input"}
EMBEDDINGS_FIELDS = {"input": "prompt"}
"""Field of the converted request → field of its origin."""


class Options(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters of sampling; and those of a model's start, which have no effect here."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    penalize_newline: bool | None = None

    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None
    num_thread: int | None = None
    numa: bool | None = None
    draft_num_predict: int | None = None
    num_keep: int | None = None

    def check(self) -> None:
        for name, values in NO_EFFECT.items():
            if (value := getattr(self, name)) not in values:
                raise InvalidRequest(
                    f"options.{name}: is not supported, got {shown(value)}; leave it out and use "
                    "temperature, top_k, top_p or min_p",
                    param=f"options.{name}",
                )
        if self.num_predict is not None and self.num_predict not in (-1, -2):
            if self.num_predict < 1:
                _refuse("options.num_predict", "at least 1, or -1 for no limit", self.num_predict)
        for name in LOAD_TIME:
            if getattr(self, name) is not None:
                _log_decided(name)
        if self.penalizes and self.repeat_last_n not in (None, -1):
            _log_whole_context()

    @property
    def penalizes(self) -> bool:
        return self.repeat_penalty not in (None, 1.0) and self.repeat_last_n != 0

    def sampling(self) -> dict[str, Any]:
        """Return the fields of a chat or a completion."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in PASSED}
        if self.penalizes:
            fields["repetition_penalty"] = self.repeat_penalty
        if self.num_predict is not None and self.num_predict > 0:
            fields["max_tokens"] = self.num_predict
        if self.seed is not None and self.seed >= 0:
            fields["seed"] = self.seed
        if self.top_k is not None:
            fields["top_k"] = max(self.top_k, 0)  # Up to 0, it means every token.
        return fields


class ModelRequest(msgspec.Struct, kw_only=True, dict=True):
    """Fields that all have that run the model."""

    implied_tag: ClassVar = ":latest"
    """Ending of a model's name that means nothing."""
    origin: ClassVar[Origin] = Origin()

    model: str
    options: Options | None = None
    keep_alive: str | float | None = None

    def check(self) -> None:
        if isinstance(self.keep_alive, str) and not DURATION.fullmatch(self.keep_alive):
            _refuse("keep_alive", "seconds, or a duration such as 5m", self.keep_alive)
        if self.options is not None:
            self.options.check()

    @property
    def unloads(self) -> bool:
        """Whether it asks to unload the model at once."""
        kept = self.keep_alive
        return kept in (0, "0") or (isinstance(kept, str) and not re.search("[1-9]", kept))

    def sampling(self) -> dict[str, Any]:
        return {} if self.options is None else self.options.sampling()


class TextRequest(ModelRequest, kw_only=True):
    """Fields of chats and completions."""

    stream: bool = True
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    truncate: bool = True
    shift: bool = True
    logprobs: bool = False
    top_logprobs: int = 0

    ignore_eos: bool = False
    stream_interval: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    kv_compression: str | bool | dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if isinstance(self.format, str) and self.format not in ("", "json"):
            _refuse("format", "json or a JSON schema", self.format)
        if isinstance(self.think, str) and self.think not in LEVELS:
            _refuse("think", f"true, false, or one of {', '.join(LEVELS)}", self.think)
        if not 0 <= self.top_logprobs <= 20:
            _refuse("top_logprobs", "between 0 and 20", self.top_logprobs)

    def sampling(self) -> dict[str, Any]:
        return super().sampling() | {name: getattr(self, name) for name in OWN}

    def response_format(self) -> dict[str, Any] | None:
        if not self.format:
            return None
        if isinstance(self.format, str):
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"schema": self.format}}

    def to_chat(
        self, switch: str | None, messages: list[Message], tools: Any = None
    ) -> ChatRequest:
        """switch: the chat template's argument for reasoning, if any. Raises InvalidRequest."""
        if self.think and switch is None:
            raise InvalidRequest(
                f"think: {shown(self.model)} does not support thinking: this server has no "
                "reasoning parser (--reasoning-parser)",
                param="think",
            )
        arguments: dict[str, Any] | None = None
        if isinstance(self.think, bool) and switch is not None:
            arguments = {switch: self.think}
        chat = ChatRequest(
            model=self.model,
            messages=messages,
            tools=tools or None,
            stream=self.stream,
            response_format=self.response_format(),
            reasoning_effort=self.think if isinstance(self.think, str) else None,
            chat_template_kwargs=arguments,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.logprobs else None,
            **self.sampling(),
        )
        chat.origin = self.origin  # type: ignore[misc]
        return chat


class OllamaChatRequest(TextRequest, kw_only=True):
    """POST /api/chat"""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None

    def chat(self, switch: str | None) -> ChatRequest:
        return self.to_chat(switch, to_messages(self.messages), self.tools)


class GenerateRequest(TextRequest, kw_only=True):
    """POST /api/generate"""

    UNSUPPORTED: ClassVar = {
        "suffix": "this server completes from the left only",
        "template": "templates of requests are Ollama's own; the server has the model's",
        "context": "send the conversation to /api/chat",
        "width": "there is no model that makes images",
        "height": "there is no model that makes images",
        "steps": "there is no model that makes images",
    }

    prompt: str = ""
    system: str = ""
    raw: bool = False
    images: list[Any] | None = None

    def check(self) -> None:
        super().check()
        if self.raw and self.system:
            raise InvalidRequest("system: needs raw=false", param="system")
        if self.raw and self.images:
            raise InvalidRequest("images: needs raw=false", param="images")
        if self.raw and self.think:
            raise InvalidRequest("think: needs raw=false", param="think")

    def chat(self, switch: str | None) -> ChatRequest:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        content = content_of(self.prompt, self.images, "images")
        return self.to_chat(switch, [*messages, {"role": "user", "content": content}])

    def completion(self) -> CompletionRequest:
        """Return the request without a chat template (`raw`)."""
        completion = CompletionRequest(
            model=self.model,
            prompt=self.prompt,
            stream=self.stream,
            response_format=self.response_format(),
            logprobs=self.top_logprobs if self.logprobs else None,
            **self.sampling(),
        )
        completion.origin = self.origin  # type: ignore[misc]
        return completion


class EmbedRequest(ModelRequest, kw_only=True):
    """POST /api/embed"""

    input: str | list[str] = []
    truncate: bool = True
    dimensions: int | None = None

    def embedding(self) -> EmbeddingRequest:
        return _embedding(self, self.input, self.dimensions or None, truncate=self.truncate)


class EmbeddingsRequest(ModelRequest, kw_only=True):
    """POST /api/embeddings"""

    prompt: str = ""

    def embedding(self) -> EmbeddingRequest:
        return _embedding(self, self.prompt, None, truncate=True)


class ShowRequest(msgspec.Struct, kw_only=True):
    """POST /api/show, /api/pull"""

    implied_tag: ClassVar = ModelRequest.implied_tag

    model: str
    stream: bool = True
    verbose: bool = False
    insecure: bool = False


def _embedding(
    request: ModelRequest, input: str | list[str], dimensions: int | None, *, truncate: bool
) -> EmbeddingRequest:
    embedding = EmbeddingRequest(
        model=request.model,
        input=input,
        dimensions=dimensions,
        truncate_prompt_tokens=-1 if truncate else None,
    )
    embedding.origin = request.origin  # type: ignore[misc]
    return embedding


def in_own_terms(error: JackfieldError, names: dict[str, str]) -> JackfieldError:
    """Return the error with Ollama's field names, in the wording that its clients search for."""
    if isinstance(error, ModelNotFound):
        name = error.message.removeprefix("model: ").partition(" is not served")[0]
        error.message = f"model {name} not found: {error.message.removeprefix('model: ')}"
    error = rename_field(error, names)
    if isinstance(error, ContextLengthExceeded):
        number = "" if error.num_prompt_tokens is None else f"{error.num_prompt_tokens} "
        error.message = (
            f"{error.param}: its {number}tokens exceed the context length of {error.limit}; "
            "shorten it"
        )
    return error


@functools.cache
def _log_decided(name: str) -> None:
    logger.info("options.%s: has no effect: the server's options have decided it", name)


@functools.cache
def _log_whole_context() -> None:
    logger.info("options.repeat_last_n: repeat_penalty counts the whole prompt and output")


def _refuse(field: str, expected: str, value: Any) -> NoReturn:
    raise InvalidRequest(f"{field}: must be {expected}, got {shown(value)}", param=field)
