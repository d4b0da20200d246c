"""Schemas of responses, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from ..openai.common.response_schemas import ChatLogprob, KVCacheDetails


class OllamaError(Struct):
    """The body of every error response of these routes."""

    error: str


class OllamaFunction(Struct):
    """A function and its arguments."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Struct):
    """A tool call."""

    id: str
    function: OllamaFunction


class OllamaMessage(Struct, omit_defaults=True):
    """A message, or a part of one."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class Statistics(Struct, omit_defaults=True, kw_only=True):
    """What the last line of a stream has, and a whole response. Durations: nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    logprobs: list[ChatLogprob] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    kv_cache_details: KVCacheDetails | None = None


class OllamaChatResponse(Statistics, kw_only=True):
    """A message, or a line of one."""

    message: OllamaMessage


class GenerateResponse(Statistics, kw_only=True):
    """A text, or a line of one."""

    response: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class EmbedResponse(Struct):
    """Vectors, in the order of the texts."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsResponse(Struct):
    """A vector."""

    embedding: list[float]


class ModelDetails(Struct):
    """What a model is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class TaggedModel(Struct):
    """A served model."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class TagsResponse(Struct):
    """The served models."""

    models: list[TaggedModel]


class LoadedModel(Struct):
    """A loaded model; it stays until the server ends."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class ProcessesResponse(Struct):
    """The loaded models."""

    models: list[LoadedModel]


class ShowResponse(Struct):
    """What is known of a model."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class PullResponse(Struct):
    """A line about a pull."""

    status: str
