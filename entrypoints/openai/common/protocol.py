"""Clients' requests: their fields, checks of their values, and the sampling parameters that these
mean."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from ....core.engine.async_engine import AsyncEngine
from ....core.errors import InvalidRequest, shown
from ....core.inputs import EmbedsPrompt
from ....core.loading.generation_config import SamplingDefaults
from ....core.sampling_params import OutputKind, SamplingParams, all_ints, kv_compression_from
from ...beam_search import BeamSearch, BeamSearchParams
from ...http.auth.origin import EngineOptions, Origin
from ...http.options import ServerOptions
from .decoding import EMPTY
from .response_format import requested

MAX_PROMPTS = 256
BESIDE_BEAMS = (
    "stream", "stop", "stop_token_ids", "presence_penalty", "frequency_penalty", "logit_bias",
    "repetition_penalty", "min_tokens", "bad_words", "allowed_token_ids", "prompt_logprobs",
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "structural_tag", "truncate_prompt_tokens", "kv_transfer_params",
    "kv_compression", "vllm_xargs",
)  # fmt: skip
"""Fields that have no meaning in a beam search."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1.0),
    "response_format": (None, {"type": "text"}),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "min_tokens": (None, 0),
}
"""Field → its values without effect, where others than EMPTY have none."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")
SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast")


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    """Ignored: streams have no padding."""


class SamplingRequest(msgspec.Struct, kw_only=True, dict=True):
    """Fields that chat and completions share. Names: OpenAI's, then vLLM's."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    """Tokens of an event of a stream, but for the first and the last; None: as the server does."""
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
    truncation_side: Literal["left", "right"] | None = None
    priority: int = 0
    cache_salt: str | None = None
    return_token_ids: bool = False
    return_weight_versions: bool = False
    """Say of each choice which weights sampled which of its tokens."""
    return_routed_experts: bool | None = None
    """Say of each choice which experts computed its tokens; None: if the server keeps them."""
    routed_experts_prompt_start: int = 0
    """The first of these tokens."""
    return_tokens_as_token_ids: bool | None = None
    """None: as the server does."""
    kv_transfer_params: dict[str, Any] | None = None
    kv_compression: str | bool | dict[str, Any] | None = None
    """How much of the request's cache stays: "off", {"ratio": …} or {"budget": …}."""
    vllm_xargs: dict[str, Any] | None = None
    request_id: str | None = None
    use_beam_search: bool = False
    """Return the n best outputs of a search of this width."""
    length_penalty: float = 1.0
    """Of beam search: what power of its length divides a sequence's log-probability."""

    origin: ClassVar[Origin] = Origin()
    """Set by `request_body.decode_call`; not a request's field."""

    def take_defaults(self, options: ServerOptions) -> None:
        """Take the server's settings for what the request leaves open."""
        if self.return_tokens_as_token_ids is None:
            self.return_tokens_as_token_ids = options.tokens_as_token_ids
        if self.stream and options.force_include_usage:
            settings = self.stream_options or StreamOptions()
            self.stream_options = msgspec.structs.replace(settings, include_usage=True)

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: needs stream=true", param="stream_options")
        if self.cache_salt == "":
            raise InvalidRequest("cache_salt: must not be empty", param="cache_salt")
        for name in BESIDE_BEAMS if self.use_beam_search else ():
            if getattr(self, name, None) not in NEUTRAL.get(name, (*EMPTY, ())):
                raise InvalidRequest(
                    f"{name}: not together with use_beam_search, which compares whole outputs by "
                    "the model's own probabilities",
                    param=name,
                )

    def beam_search(
        self,
        engine: AsyncEngine,
        token_ids: list[int],
        params: SamplingParams,
        options: EngineOptions,
    ) -> BeamSearch:
        """Return the search over a prompt. params: of `sampling`. Raises InvalidRequest."""
        if params.structured_outputs is not None:  # The grammar of calls.
            raise InvalidRequest(
                "tool_choice: must be auto or none with use_beam_search", param="tool_choice"
            )
        room = max(1, engine.model_config.max_model_len - len(token_ids))
        limit = room if params.max_tokens is None else params.max_tokens
        beams = BeamSearchParams(
            beam_width=params.n,
            max_tokens=min(limit, room) if params.max_tokens_field is None else limit,
            ignore_eos=params.ignore_eos,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
        return BeamSearch(engine, None, token_ids, beams, params, options, width_field="n")

    @property
    def token_limit_field(self) -> str | None:
        """Field that limits the output's tokens, if given."""
        return None if self.max_tokens is None else "max_tokens"

    def sampling(
        self, max_tokens: int | None, logprobs: int | None, defaults: SamplingDefaults
    ) -> SamplingParams:
        stop = self.stop
        fields: dict[str, Any] = {
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
            **defaults.values | {name: v for name, v in fields.items() if v is not None},
            max_tokens=capped(defaults.limited(max_tokens), self.origin.tenant.limits.max_tokens),
            max_tokens_field=self.token_limit_field,
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
            truncation_side=self.truncation_side or "left",
            output_kind=OutputKind.DELTA if self.stream else OutputKind.FINAL_ONLY,
            stream_interval=self.stream_interval,
            kv_transfer_params=self.kv_transfer_params,
            kv_compression=(
                None if self.kv_compression is None else kv_compression_from(self.kv_compression)
            ),
            extra_args=self.vllm_xargs,
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
    prompt_embeds: str | list[str] | None = None
    """Prompts as embeddings, before those of `prompt`: base64 of what torch.save writes."""
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int] | EmbedsPrompt]:
        """Return the prompts; those of embeddings are first."""
        embeds = self.prompt_embeds or []
        embeds = [embeds] if isinstance(embeds, str) else embeds
        for name in ("echo", "prompt_logprobs", "truncate_prompt_tokens", "use_beam_search"):
            if embeds and getattr(self, name) not in (None, False):
                raise InvalidRequest(f"{name}: not together with prompt_embeds", param=name)
        prompts: list[str | list[int] | EmbedsPrompt] = [{"prompt_embeds": one} for one in embeds]
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequest(
                f"prompt_embeds: at most {MAX_PROMPTS} at once", param="prompt_embeds"
            )
        if prompts and self.prompt in (None, "", []):
            return prompts
        return prompts + self._prompts_of_tokens()

    def _prompts_of_tokens(self) -> list[Any]:
        prompt = self.prompt
        if prompt is None or prompt == []:
            raise InvalidRequest("prompt: must not be empty", param="prompt")
        if isinstance(prompt, str) or _is_token_ids(prompt):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} at once", param="prompt")
        if not all(isinstance(item, str) or _is_token_ids(item) for item in prompt):
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
    mm_processor_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True
    echo: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None

    modalities: list[str] | None = None
    prediction: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise InvalidRequest("top_logprobs: needs logprobs=true", param="top_logprobs")
            if self.top_logprobs < 0:
                _refuse("top_logprobs", "at least 0", self.top_logprobs)
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            _refuse("max_completion_tokens", "at least 1", self.max_completion_tokens)
        for name, values in (
            ("reasoning_effort", EFFORTS),
            ("verbosity", VERBOSITIES),
            ("service_tier", SERVICE_TIERS),
        ):
            if (value := getattr(self, name)) is not None and value not in values:
                _refuse(name, f"one of {', '.join(values)}", value)
        for modality in self.modalities or ():
            if modality != "text":
                _refuse("modalities", '["text"]', self.modalities)
        if self.prediction is not None and self.prediction.get("type") != "content":
            raise InvalidRequest('prediction.type: must be "content"', param="prediction.type")
        if self.predicted is None and self.prediction is not None:
            raise InvalidRequest(
                'prediction.content: must be a text, or a list of {"type": "text", "text": ...}',
                param="prediction.content",
            )

    @property
    def predicted(self) -> str | None:
        """The expected output; None: there is no `prediction`, or it is no text."""
        content = None if self.prediction is None else self.prediction.get("content")
        if isinstance(content, list):
            texts = [_text_of(part) for part in content]
            known_texts = [text for text in texts if text is not None]
            content = "".join(known_texts) if len(known_texts) == len(texts) else None
        return content if isinstance(content, str) else None

    @property
    def token_limit_field(self) -> str | None:
        return (
            super().token_limit_field
            if self.max_completion_tokens is None
            else ("max_completion_tokens")
        )

    def shown_logprobs(self, limit: int) -> int | None:
        """Return `SamplingParams.logprobs`. limit: largest allowed number, -1 for any."""
        if self.top_logprobs is not None and -1 < limit < self.top_logprobs:
            _refuse("top_logprobs", f"at most max_logprobs={limit}", self.top_logprobs)
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def begins_message(self) -> bool:
        """Whether the output is a new message, begun by the prompt."""
        return self.add_generation_prompt and not self.continue_final_message

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
    mm_processor_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize"""

    tokens: list[int]
    model: str | None = None


def capped(tokens: int | None, cap: int | None) -> int | None:
    return min((limit for limit in (tokens, cap) if limit is not None), default=None)


def _refuse(field: str, expected: str, value: Any) -> None:
    raise InvalidRequest(f"{field}: must be {expected}, got {shown(value)}", param=field)


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all_ints(value)


def _text_of(part: object) -> str | None:
    """Return the text of a content part; None: it is none."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    return text if isinstance(text, str) else None
