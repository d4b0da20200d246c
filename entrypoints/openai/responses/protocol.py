"""The requests of /v1/responses, and their conversion to chat requests."""

from __future__ import annotations

import re
import uuid
from typing import Any, ClassVar

import msgspec

from ....core.errors import InvalidRequest, JackfieldError, shown
from ...http.auth.origin import Origin
from ..common.protocol import VERBOSITIES, ChatRequest
from ..common.renamed_fields import rename_field
from .tools import Tools, chosen

ID_PREFIX = "resp_"
PLAIN_ID = re.compile(r"[\w.:-]{1,256}", re.ASCII)
"""Ids that may stand in a path."""
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS, "reasoning.encrypted_content", "web_search_call.results",
    "web_search_call.action.sources", "file_search_call.results", "code_interpreter_call.outputs",
    "message.input_image.image_url", "computer_call_output.output.image_url",
)  # fmt: skip
"""The second requests the reasoning, which is plain text here. Later ones request details that this
server's output never has."""
SUMMARIES = ("auto", "concise", "detailed")
"""Accepted without effect: reasoning is not summarized."""
EFFORTS = {
    "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high",
    "max": "high",
}  # fmt: skip
"""`reasoning.effort` → the template's `reasoning_effort`; "none" turns reasoning off."""
PASSED = (
    "temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty",
    "logit_bias", "structured_outputs", "top_k", "min_p", "repetition_penalty", "min_tokens",
    "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens",
    "bad_words", "allowed_token_ids", "priority", "cache_salt", "parallel_tool_calls",
    "kv_transfer_params", "kv_compression", "spaces_between_special_tokens", "stream_interval",
    "vllm_xargs",
)  # fmt: skip
"""Fields of the same meaning in responses and chats."""
RENAMED = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format.json_schema": "text.format.schema",
    "response_format": "text.format",
}
"""Chat field → response field of its origin; longer names first."""


class TextConfig(msgspec.Struct, kw_only=True):
    """The form of the output text."""

    format: dict[str, Any] | None = None
    """text, json_object, or json_schema with `name` and `schema` inside (not nested as in chat)."""
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """How much to reason."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, dict=True):
    """POST /v1/responses. Names: OpenAI's, then vLLM's."""

    origin: ClassVar[Origin] = Origin()

    REFUSED: ClassVar = {
        "conversation": "chain responses with previous_response_id instead",
        "prompt": "this server keeps no prompt templates",
        "context_management": "this server compacts nothing; truncation can be auto",
        "moderation": "this server does not moderate",
        "image": "pictures are input_image parts of the input",
    }
    """Unsupported fields of OpenAI's → error text."""

    input: str | list[Any] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    image: Any = None

    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    structured_outputs: dict[str, Any] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stream_interval: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    priority: int = 0
    cache_salt: str | None = None
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    kv_compression: str | bool | dict[str, Any] | None = None
    request_id: str | None = None
    """The response's id, "resp_" before it if it does not begin so."""

    def check(self) -> None:
        for name, why in self.REFUSED.items():
            if getattr(self, name) not in (None, [], {}):
                raise InvalidRequest(f"{name}: is not supported; {why}", param=name)
        for index, name_included in enumerate(self.include or ()):
            if name_included not in INCLUDABLE:
                raise InvalidRequest(
                    f"include[{index}]: {shown(name_included)} is not supported (there is: "
                    f"{', '.join(INCLUDABLE)})",
                    param=f"include[{index}]",
                )
        _one_of("truncation", self.truncation, ("auto", "disabled"))
        if self.text is not None:
            _one_of("text.verbosity", self.text.verbosity, VERBOSITIES)
        if self.reasoning is not None:
            _one_of("reasoning.effort", self.reasoning.effort, ("none", *EFFORTS))
            for name in ("summary", "generate_summary"):
                _one_of(f"reasoning.{name}", getattr(self.reasoning, name), SUMMARIES)
        if self.background and self.store is False:
            raise InvalidRequest("background: needs store", param="background")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= 20:
            raise InvalidRequest(
                f"top_logprobs: must be between 0 and 20, got {self.top_logprobs}",
                param="top_logprobs",
            )
        _check_metadata(self.metadata or {})

    def new_id(self) -> str:
        """Return the response's id: the request's own, or a new one. Raises InvalidRequest."""
        own = self.request_id
        if own is None:
            return f"{ID_PREFIX}{uuid.uuid4().hex}"
        if not PLAIN_ID.fullmatch(own):
            raise InvalidRequest(
                "request_id: must be 1 to 256 letters, digits, or any of . _ : -, got "
                f"{shown(own)}",
                param="request_id",
            )
        return own if own.startswith(ID_PREFIX) else f"{ID_PREFIX}{own}"

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def chat(
        self,
        messages: list[dict[str, Any]],
        tools: Tools,
        switch: str | None,
    ) -> ChatRequest:
        """Return the request as a chat request.

        tools: including those in items. switch: the template's argument for reasoning, if any.
        Raises InvalidRequest with the field's name.
        """
        tools, choice = chosen(tools, self.tool_choice)
        functions = [
            {"type": "function", "function": tool.function} for tool in tools.offered.values()
        ]
        chat = ChatRequest(
            model=self.model,
            messages=messages,
            stream=bool(self.stream or self.background),
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs or None,
            top_logprobs=self.top_logprobs if self.wants_logprobs else None,
            tools=functions or None,
            tool_choice=choice,
            response_format=self._format(),
            verbosity=self.text.verbosity if self.text is not None else None,
            chat_template_kwargs=self._template_kwargs(switch),
            **{name: getattr(self, name) for name in PASSED},
        )
        chat.origin = self.origin  # type: ignore[misc]
        return chat

    def _format(self) -> dict[str, Any] | None:
        format = self.text.format if self.text is not None else None
        if format is None or format.get("type") == "text":
            return None
        match format.get("type"):
            case "json_object":
                return {"type": "json_object"}
            case "json_schema":
                return {"type": "json_schema", "json_schema": format}
            case other:
                raise InvalidRequest(
                    f"text.format.type: must be text, json_object or json_schema, got "
                    f"{shown(other)}",
                    param="text.format.type",
                )

    def _template_kwargs(self, switch: str | None) -> dict[str, Any] | None:
        """Return the effort as template arguments; the request's own take precedence."""
        effort = self.reasoning.effort if self.reasoning is not None else None
        kwargs: dict[str, Any] = {}
        if effort is not None:
            kwargs[switch or "enable_thinking"] = effort != "none"
        if effort in EFFORTS:
            kwargs["reasoning_effort"] = EFFORTS[effort]
        kwargs.update(self.chat_template_kwargs or {})
        return kwargs or None


def _one_of(field: str, value: Any, values: tuple[str, ...]) -> None:
    if value is not None and value not in values:
        raise InvalidRequest(
            f"{field}: {shown(value)} is not supported (there is: {', '.join(values)})", param=field
        )


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > 16:
        raise InvalidRequest(f"metadata: at most 16 keys, got {len(metadata)}", param="metadata")
    for key, value in metadata.items():
        if len(key) > 64 or len(value) > 512:
            raise InvalidRequest(
                "metadata: keys have at most 64 characters and values 512", param="metadata"
            )


def renamed(error: JackfieldError) -> JackfieldError:
    """Return the error with a response's field names."""
    return rename_field(error, RENAMED)
