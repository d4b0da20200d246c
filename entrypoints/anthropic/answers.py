"""The shapes of answers, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class ErrorDetails(Struct):
    """By what a client tells one refusal from the others."""

    error_code: str


class ErrorFacts(Struct, omit_defaults=True):
    """What went wrong."""

    type: str
    message: str
    details: ErrorDetails | None = None


class MessageError(Struct):
    """Every error of these routes."""

    type: Literal["error"]
    error: ErrorFacts


class TextBlock(Struct, tag="text"):
    """A piece of the answer."""

    text: str


class ThinkingBlock(Struct, tag="thinking"):
    """A thought."""

    thinking: str
    signature: str


class ToolUseBlock(Struct, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class TokensDetails(Struct):
    """What the output's tokens were."""

    thinking_tokens: int


class UsageFacts(Struct, omit_defaults=True):
    """Tokens of a message; the prompt's are the first three together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: TokensDetails | None = None


class MessageAnswer(Struct):
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
    """An event of a stream; what else it has depends on its type."""

    type: Literal[
        "message_start", "ping", "content_block_start", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


class TokensAnswer(Struct):
    """How long a prompt is."""

    input_tokens: int
