"""Schemas of responses, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from ..openai.common.response_schemas import KVCacheDetails


class ErrorDetails(Struct):
    """Type of the error, for programs."""

    error_code: str


class ErrorFacts(Struct, omit_defaults=True):
    """The error."""

    type: str
    message: str
    details: ErrorDetails | None = None


class MessageError(Struct):
    """The body of every error response of these routes."""

    type: Literal["error"]
    error: ErrorFacts


class TextBlock(Struct, tag="text"):
    """Text of the response."""

    text: str


class ThinkingBlock(Struct, tag="thinking"):
    """Reasoning."""

    thinking: str
    signature: str


class ToolUseBlock(Struct, tag="tool_use"):
    """A tool call."""

    id: str
    name: str
    input: dict[str, Any]


class TokensDetails(Struct):
    """The output tokens by kind."""

    thinking_tokens: int


class UsageFacts(Struct, omit_defaults=True):
    """Token counts of a message. The prompt's count is the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: TokensDetails | None = None
    kv_cache_details: KVCacheDetails | None = None


class MessageResponse(Struct):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: (
        Literal[
            "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
        ]
        | None
    )
    stop_sequence: str | None
    usage: UsageFacts


class MessageEvent(Struct):
    """An event of a stream; its other fields depend on its type."""

    type: Literal[
        "message_start", "ping", "content_block_start", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


class TokensResponse(Struct):
    """The number of tokens of a prompt."""

    input_tokens: int
