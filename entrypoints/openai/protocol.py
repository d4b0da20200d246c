"""What clients may send: typed requests, decoded by msgspec, turned into sampling parameters.

Fields that nobody knows are ignored, as OpenAI's own clients send new ones all the time. Fields
that are known and not supported are refused by name when they ask for something.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ...core.errors import InvalidRequest
from ...core.types import OutputKind, SamplingParams
from .structured import requested

T = TypeVar("T")
MAX_PROMPTS = 256

UNSUPPORTED = (
    "suffix", "functions", "function_call", "audio", "modalities", "prediction",
    "web_search_options",
    "use_beam_search", "chat_template", "documents", "prompt_embeds",
)  # fmt: skip


class StreamOptions(msgspec.Struct):
    """How to stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingRequest(msgspec.Struct, kw_only=True):
    """What chat and completions have in common. Names: OpenAI's, then vLLM's."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    return_token_ids: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    request_id: str | None = None

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """As the engine takes it. Raises InvalidRequest with the field's name."""
        stop = self.stop
        given: dict[str, Any] = {
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "min_tokens": self.min_tokens,
        }
        return SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            max_tokens=max_tokens,
            seed=self.seed,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            logit_bias=self.logit_bias,
            structured_outputs=requested(self),
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            bad_words=tuple(self.bad_words or ()),
            allowed_token_ids=(
                None if self.allowed_token_ids is None else tuple(self.allowed_token_ids)
            ),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            output_kind=OutputKind.DELTA if self.stream else OutputKind.FINAL_ONLY,
            kv_transfer_params=self.kv_transfer_params,
        )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class CompletionRequest(SamplingRequest, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[Any] | None = None
    """Text, token ids, or a list of either."""
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """One or many. Raises InvalidRequest."""
        prompt = self.prompt
        if prompt is None or prompt == []:
            raise InvalidRequest("prompt: must not be empty", param="prompt")
        if isinstance(prompt, str) or _is_token_ids(prompt):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} at once", param="prompt")
        if not all(isinstance(one, str) or _is_token_ids(one) for one in prompt):
            raise InvalidRequest(
                "prompt: must be text, a list of token ids, or a list of such", param="prompt"
            )
        return prompt


class ChatRequest(SamplingRequest, kw_only=True):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True
    echo: bool = False

    def check(self) -> None:
        """Refuse what is not supported yet."""
        if self.echo:
            raise InvalidRequest("echo: is not supported for chat yet", param="echo")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs=true", param="top_logprobs")

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize"""

    tokens: list[int]
    model: str | None = None


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def decode(body: bytes, kind: type[T]) -> T:
    """A request of this kind. Raises InvalidRequest with the field's path."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise InvalidRequest("the body must be a JSON object")
    for name in UNSUPPORTED:
        if raw.get(name) not in (None, False, [], {}) and name not in kind.__struct_fields__:  # type: ignore[attr-defined]
            raise InvalidRequest(f"{name}: is not supported by this server", param=name)
    try:
        return msgspec.convert(raw, kind, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        param = path.rstrip("`").removeprefix("$.").replace("[...]", "") or None
        if param is None and "`" in message:
            param = message.split("`")[-2]
        raise InvalidRequest(f"{param or 'body'}: {message}", param=param) from None
