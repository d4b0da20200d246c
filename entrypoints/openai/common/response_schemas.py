"""Response bodies as Structs, for the OpenAPI document and tests.

Handlers write plain dicts, as a Struct per streamed token is slow. Optional fields default to
UNSET. OpenAI's fields come first.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ....core.outputs import WeightSpan


class Error(Struct):
    """An error."""

    message: str
    type: str
    param: str | None
    """The field that caused it, if any."""
    code: str | int | None


class ErrorResponse(Struct):
    """Body of every error response."""

    error: Error


class PromptTokensDetails(Struct):
    """Details of the prompt's token count."""

    cached_tokens: int
    audio_tokens: int | UnsetType = UNSET
    image_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(Struct):
    """Details of the completion's token count: with a reasoning parser, and with drafts."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class KVCacheDetails(Struct):
    """What KV compression has left of the caches, at the end."""

    kept_tokens: int
    dropped_tokens: int
    compactions: int
    saved_bytes: int
    """Bytes, on each rank, of the blocks that compactions gave back."""


class Usage(Struct, kw_only=True):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    kv_cache_details: KVCacheDetails | UnsetType = UNSET


class PromptLogprob(Struct):
    """Log-probability of one token at one position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""vLLM's form: one entry per position, token id → PromptLogprob."""


class TokenLogprob(Struct):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TokenLogprob):
    """The token that was sampled, with its alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    """One entry per token."""

    content: list[ChatLogprob]


class CalledFunction(Struct):
    """The function that a tool call names, and its arguments."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(Struct):
    """One tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Struct, kw_only=True):
    """The message of a response."""

    role: str
    content: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One of n choices."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightSpan] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET


class ChatResponse(Struct, kw_only=True):
    """OpenAI's chat.completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class FunctionPart(Struct, kw_only=True):
    """The name comes once, then the arguments in chunks."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallPart(Struct, kw_only=True):
    """The id comes once, with the name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionPart


class ChatDelta(Struct, kw_only=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    """One of n choices."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightSpan] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """OpenAI's chat.completion.chunk: one event."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class CompletionLogprobs(Struct):
    """Parallel lists with one item per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    """One of n choices per prompt, prompts one after the other."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightSpan] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class CompletionChunk(Struct, kw_only=True):
    """One event."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET


class CompletionResponse(Struct, kw_only=True):
    """OpenAI's text_completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class PoolingUsage(Struct):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PoolingList(Struct, kw_only=True):
    """Fields that the lists of vectors, labels and scores share."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PoolingUsage


class Embedding(Struct):
    """The vector of one text."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str
    """Numbers, or base64 of little-endian float32."""


class EmbeddingResponse(PoolingList, kw_only=True):
    """One vector per text."""

    data: list[Embedding]


class Pooled(Struct):
    """The pooled data of one text."""

    index: int
    object: Literal["pooling"]
    data: list[float | list[float]] | str
    """Numbers, per token if the task is per token; or base64 of them."""


class PoolingResponse(PoolingList, kw_only=True):
    """The model's pooled data for each text."""

    data: list[Pooled]


class Classified(Struct):
    """The label of one text."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(PoolingList, kw_only=True):
    """One probability per label."""

    data: list[Classified]


class Scored(Struct):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(PoolingList, kw_only=True):
    """One score per pair."""

    data: list[Scored]


class RankedDocument(Struct):
    """The text, or the parts of a message, as it was sent."""

    text: str | UnsetType = UNSET
    multi_modal: list[Any] | UnsetType = UNSET


class Ranked(Struct, kw_only=True):
    """Rank of one document."""

    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class RerankResponse(Struct):
    """Documents, the best match first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[Ranked]


class ModelCard(Struct):
    """One served model name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    input_modalities: list[str]


class ModelList(Struct):
    """The served model names."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(Struct):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class InputTokensResponse(Struct):
    """Number of tokens of a response's prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DetokenizeResponse(Struct):
    """Text."""

    prompt: str


class VersionResponse(Struct):
    """Jackfield's version."""

    version: str


class PluginList(Struct):
    """One row of `jackfield plugins --json`."""

    object: Literal["list"]
    data: list[dict[str, Any]]
