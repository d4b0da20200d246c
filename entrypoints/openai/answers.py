"""What the server answers, as Structs: the OpenAPI document's schemas, which tests hold answers to.

The handlers write these shapes from plain dicts, because a Struct a streamed token costs time. A
field that only some requests get has UNSET for its default. OpenAI's fields come first.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class Error(Struct):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    """The field, where there is one."""
    code: str | int | None


class ErrorAnswer(Struct):
    """Every refusal and failure."""

    error: Error


class PromptTokensDetails(Struct):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """Of the answer's tokens."""

    reasoning_tokens: int


class Usage(Struct, kw_only=True):
    """Counted in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptLogprob(Struct):
    """Of one token at one position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""vLLM's: a position each, token id → PromptLogprob."""


class TokenLogprob(Struct):
    """A token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TokenLogprob):
    """The token that was chosen."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    """A token each."""

    content: list[ChatLogprob]


class CalledFunction(Struct):
    """What a tool call calls."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(Struct):
    """One call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Struct, kw_only=True):
    """The answer."""

    role: str
    content: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One of n."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(Struct, kw_only=True):
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
    """The name comes once, then the arguments in pieces."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallPart(Struct, kw_only=True):
    """The id comes once, with the name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionPart


class ChatDelta(Struct, kw_only=True):
    """What an event adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    """One of n."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


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
    """Parallel lists, a token each."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    """One of n of a prompt, prompts one after the other."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class CompletionChunk(Struct, kw_only=True):
    """One event."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET


class CompletionAnswer(Struct, kw_only=True):
    """OpenAI's text_completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class PoolingUsage(Struct):
    """Counted in tokens."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PoolingList(Struct, kw_only=True):
    """What the lists of vectors, labels and scores have in common."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PoolingUsage


class Embedding(Struct):
    """One text's."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str
    """Numbers, or base64 of little-endian float32."""


class EmbeddingAnswer(PoolingList, kw_only=True):
    """A vector a text."""

    data: list[Embedding]


class Pooled(Struct):
    """One text's."""

    index: int
    object: Literal["pooling"]
    data: list[float | list[float]] | str
    """Numbers, for each token where the task is a token's; or base64 of them."""


class PoolingAnswer(PoolingList, kw_only=True):
    """What the model gives for each text."""

    data: list[Pooled]


class Classified(Struct):
    """One text's."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(PoolingList, kw_only=True):
    """A probability a label."""

    data: list[Classified]


class Scored(Struct):
    """One pair's."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(PoolingList, kw_only=True):
    """A number a pair."""

    data: list[Scored]


class RankedDocument(Struct):
    """The text as it was given."""

    text: str


class Ranked(Struct, kw_only=True):
    """One document's place."""

    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class RerankAnswer(Struct):
    """The best first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[Ranked]


class ModelCard(Struct):
    """One served name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Struct):
    """The names that are served."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(Struct):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class InputTokensAnswer(Struct):
    """How long a response's prompt is."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DetokenizeAnswer(Struct):
    """Text."""

    prompt: str


class VersionAnswer(Struct):
    """Jackfield's."""

    version: str


class PluginList(Struct):
    """As `jackfield plugins --json` prints it."""

    object: Literal["list"]
    data: list[dict[str, Any]]
