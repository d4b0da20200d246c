"""The requests of /v1/messages, and their conversion to chat requests."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, TypeVar

import msgspec

from ...core.errors import ContextLengthExceeded, InvalidRequest, JackfieldError, shown
from ..http.auth.origin import Origin
from ..openai.common.protocol import ChatRequest
from ..openai.common.renamed_fields import rename_field
from ..openai.responses.protocol import EFFORTS
from .conversation import is_prefilled, to_messages
from .tools import chat_choice, chat_tools

E = TypeVar("E", bound=JackfieldError)

UNTHREADED = "thread_unsupported_request"
"""Error code after which Anthropic's SDK retries without a thread."""
THINKING = {"enabled": True, "adaptive": True, "disabled": False}
"""`thinking.type` → the chat template's argument."""
DISPLAYS = ("summarized", "omitted", "updates")
PASSED = (
    "temperature", "top_p", "top_k", "seed", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "priority", "cache_salt",
    "kv_compression", "stream_interval",
)  # fmt: skip
"""Fields of the same meaning in messages and chats."""
RENAMED = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "prompt": "messages",
    "continue_final_message": "messages",
}
"""Chat field → message field of its origin; longer names first."""


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens: the fields that determine the prompt."""

    REFUSED: ClassVar = {
        "container": "there are no containers here",
        "mcp_servers": "this server calls no tools; give them as tools",
        "thread": "this server keeps no conversations; send the whole one",
    }
    """Unsupported fields of Anthropic's → error text."""

    messages: list[Any]
    model: str | None = None
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    container: Any = None
    mcp_servers: Any = None
    thread: Any = None

    def check(self) -> None:
        for name, why in self.REFUSED.items():
            if getattr(self, name) not in (None, [], {}):
                error = InvalidRequest(f"{name}: is not supported; {why}", param=name)
                error.code = UNTHREADED if name == "thread" else None
                raise error
        if self.thinking is not None:
            self._check_thinking(self.thinking)

    def _check_thinking(self, thinking: dict[str, Any]) -> None:
        kind = thinking.get("type")
        if not isinstance(kind, str) or kind not in THINKING:
            _refuse("thinking.type", f"one of {', '.join(THINKING)}", kind)
        budget = thinking.get("budget_tokens")
        if budget is not None and not (
            isinstance(budget, int | float) and not isinstance(budget, bool) and budget >= 1
        ):
            _refuse("thinking.budget_tokens", "a number of at least 1", budget)
        if (display := thinking.get("display")) is not None and display not in DISPLAYS:
            _refuse("thinking.display", f"one of {', '.join(DISPLAYS)}", display)
        if THINKING[kind] and is_prefilled(self.messages):
            raise InvalidRequest(
                "thinking: the last message is the assistant's, so the answer has begun; leave "
                "one of them out",
                param="thinking",
            )

    @property
    def shows_thinking(self) -> bool:
        return (self.thinking or {}).get("display") != "omitted"

    def chat(self, switch: str | None) -> ChatRequest:
        """Return the request as a chat request.

        switch: the template's argument for thinking, if any.
        """
        tools = chat_tools(self.tools)
        choice, parallel = chat_choice(self.tool_choice, tools)
        prefilled = is_prefilled(self.messages)
        return ChatRequest(
            model=self.model,
            messages=to_messages(self.system, self.messages),
            continue_final_message=prefilled,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=parallel,
            response_format=self._format(),
            chat_template_kwargs=self._template_arguments(switch, prefilled),
            **self._sampling(),
        )

    def _sampling(self) -> dict[str, Any]:
        return {}

    def _template_arguments(self, switch: str | None, prefilled: bool) -> dict[str, Any] | None:
        """Return the template arguments; the request's own take precedence."""
        arguments: dict[str, Any] = {}
        if switch is not None and prefilled:
            arguments[switch] = False  # The message has begun, so its reasoning is over.
        elif switch is not None and self.thinking is not None:
            arguments[switch] = THINKING[self.thinking["type"]]
        effort = (self.output_config or {}).get("effort")
        if effort is not None:
            if not isinstance(effort, str) or effort not in EFFORTS:
                _refuse("output_config.effort", f"one of {', '.join(EFFORTS)}", effort)
            arguments["reasoning_effort"] = EFFORTS[effort]
        arguments.update(self.chat_template_kwargs or {})
        return arguments or None

    def _format(self) -> dict[str, Any] | None:
        field, format = "output_config.format", (self.output_config or {}).get("format")
        if format is None:
            field, format = "output_format", self.output_format
        if format is None:
            return None
        if not isinstance(format, dict) or format.get("type") != "json_schema":
            raise InvalidRequest(
                f'{field}: must be {{"type": "json_schema", "schema": …}}', param=field
            )
        return {"type": "json_schema", "json_schema": format}


class MessagesRequest(CountTokensRequest, kw_only=True, dict=True):
    """POST /v1/messages. Names: Anthropic's, then this server's as in a chat."""

    origin: ClassVar[Origin] = Origin()

    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    seed: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stream_interval: int | None = None
    stop_token_ids: list[int] | None = None
    priority: int = 0
    cache_salt: str | None = None
    kv_compression: str | bool | dict[str, Any] | None = None

    def chat(self, switch: str | None) -> ChatRequest:
        chat = super().chat(switch)
        chat.origin = self.origin  # type: ignore[misc]
        return chat

    def _sampling(self) -> dict[str, Any]:
        return {
            "stream": self.stream,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            **{name: getattr(self, name) for name in PASSED},
        }


def in_own_terms(error: E) -> E:
    """Return the error with a message's field names, in the wording that Anthropic's clients search
    for.
    """
    if isinstance(error, ContextLengthExceeded):
        reason = error.message
        if error.num_prompt_tokens is not None:
            reason = f"{error.num_prompt_tokens} tokens > {error.limit} maximum"
        error.message, error.param = f"prompt is too long: {reason}", "messages"
    return rename_field(error, RENAMED)


def _refuse(field: str, expected: str, value: Any) -> NoReturn:
    raise InvalidRequest(f"{field}: must be {expected}, got {shown(value)}", param=field)
