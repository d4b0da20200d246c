"""Parameters of generation: `SamplingParams`, with their limits."""

from __future__ import annotations

import enum
import math
from typing import Any, Literal

import msgspec

from .errors import InvalidRequest, shortened, shown


class OutputKind(enum.StrEnum):
    """Content of each `RequestOutput` of a stream."""

    CUMULATIVE = "cumulative"
    """All text and tokens so far."""
    DELTA = "delta"
    """Only the text and tokens since the previous output."""
    FINAL_ONLY = "final_only"
    """One output, at the end."""


MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
"""Characters of one."""
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 128
"""Characters of one."""
MAX_LOGIT_BIAS = 8192
MAX_ALLOWED_TOKEN_IDS = 1 << 19
"""More than any vocabulary has."""
MAX_NAME_LENGTH = 1024
"""Characters of `request_id` and `cache_salt`."""


def all_ints(values: Any) -> bool:
    """Return whether all values are integers, not booleans."""
    return set(map(type, values)) <= {int}


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the output: exactly one of the kinds. Names are vLLM's.

    Raises `InvalidRequest` with the field's name.
    """

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, as text or decoded."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: tuple[str, ...] | None = None
    """The output is one of these strings."""
    grammar: str | None = None
    """A context-free grammar in Lark's or GBNF's (EBNF) syntax."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Schemas between markers in free text: `{"structures": [{"begin", "schema", "end"}],
    "triggers": [...]}`."""
    after_reasoning: bool | None = None
    """Whether the grammar begins where the reasoning ends. None: in a chat with a reasoning parser,
    yes; in a completion, no."""
    strict: bool | None = None
    """For schemas: refuse formats and keywords that cannot be enforced, by name, instead of leaving
    them unchecked."""
    field: str = ""
    """The caller's name for the field, for errors; default: `structured_outputs` and the kind."""

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))
        kinds = [name for name in STRUCTURED_KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:
            kinds.insert(0, "json")
        if len(kinds) != 1:
            listing = " and ".join(kinds) or "none"
            raise InvalidRequest(
                f"structured_outputs: exactly one of {', '.join(STRUCTURED_KINDS)} must be given, "
                f"got {listing}",
                param="structured_outputs",
            )
        (kind,) = kinds
        value = getattr(self, kind)
        types: Any = {
            "json": (str, dict, bool),
            "choice": tuple,
            "json_object": bool,
            "structural_tag": (str, dict),
        }.get(kind, str)
        if not isinstance(value, types) or value in ("", ()):
            raise InvalidRequest(
                f"structured_outputs: {kind} is empty or of the wrong type "
                f"({type(value).__name__})",
                param=f"structured_outputs.{kind}",
            )
        if kind == "choice" and any(not isinstance(c, str) or not c for c in value):
            raise InvalidRequest(
                "structured_outputs: choice must be a list of non-empty strings",
                param="structured_outputs.choice",
            )


STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


_SWITCHES = (
    "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "detokenize",
)  # fmt: skip


class KVCompressionParams(msgspec.Struct, frozen=True):
    """How much of one request's cache stays. Raises InvalidRequest with the field's name."""

    ratio: float | None = None
    """Share of the sequence's tokens that stays, in (0, 1]."""
    budget: int | None = None
    """Tokens that stay, at least 1."""
    enabled: bool = True
    """False: the whole cache stays."""

    def __post_init__(self) -> None:
        def refuse(name: str, expected: str) -> None:
            value = shown(getattr(self, name))
            raise InvalidRequest(
                f"kv_compression.{name} must be {expected}, got {value}",
                param=f"kv_compression.{name}",
            )

        ratio, budget = self.ratio, self.budget
        if ratio is not None and (
            isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0.0 < ratio <= 1.0
        ):
            refuse("ratio", "a number in (0, 1]")
        if budget is not None and (
            isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget < 2**31
        ):
            refuse("budget", f"an integer from 1 to {2**31 - 1}")
        if ratio is not None and budget is not None:
            refuse("budget", "left out beside a ratio")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters for choosing tokens of one request. Names and defaults are vLLM's.

    Raises `InvalidRequest` with the field's name when a value is out of range.
    """

    n: int = 1
    """Number of completions for the prompt."""
    max_tokens: int | None = None
    """Maximum number of tokens to generate; None: as many as the context leaves."""
    max_tokens_field: str | None = None
    """The caller's name for `max_tokens`: a value beyond what the context leaves is then refused
    under that name. None: such a value is reduced to what the context leaves."""
    min_tokens: int = 0
    """Minimum number of tokens before the output may stop (EOS, stop ids, stop strings)."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the most likely tokens whose probabilities together reach this; in (0, 1]."""
    top_k: int = 0
    """0 or -1: no limit."""
    min_p: float = 0.0
    """Keep tokens at least this probable, relative to the most probable one."""
    seed: int | None = None
    """Seed of the random numbers: the same seed gives the same tokens, whatever else is in the
    batch."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the output already contains; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """The same, multiplied by the token's count in the output; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Above 1: tokens of prompt and output become less likely; in [0.01, 100]."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; cut off unless `include_stop_str_in_output`."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, besides the model's EOS."""
    include_stop_str_in_output: bool = False
    """Leave the stop string, or the stop token's text, in the output."""
    ignore_eos: bool = False
    """Continue after the model's EOS."""
    logprobs: int | None = None
    """Log-probabilities of the most likely tokens at each position, besides the sampled one's;
    -1: the whole vocabulary."""
    prompt_logprobs: int | None = None
    """The same for each prompt token."""
    logit_bias: dict[int, float] | None = None
    """Token id → number added to its logit, in [-100, 100]."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may be sampled."""
    bad_words: tuple[str, ...] = ()
    """Words that may not be generated: the last token of a word is masked after its preceding
    tokens."""
    structured_outputs: StructuredOutputsParams | None = None
    """A schema, regular expression or grammar that constrains the output."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces around special tokens that are shown, where the tokenizer does."""
    detokenize: bool = True
    """Off: token ids only, no text (and no stop strings)."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many prompt tokens; -1: as many as the context holds."""
    truncation_side: Literal["left", "right"] = "left"
    """The side on which the prompt is truncated: left keeps its last tokens."""
    output_kind: OutputKind = OutputKind.CUMULATIVE
    """Content of each output of the stream: see `OutputKind`."""
    stream_interval: int | None = None
    """Tokens of an output of the stream but for the first, of one token or more, and the last;
    None: as the engine says."""
    kv_transfer_params: dict[str, Any] | None = None
    """Parameters for the KV connector, which defines their meaning."""
    kv_compression: KVCompressionParams | None = None
    """How much of the request's cache stays, with an engine that compresses caches; None: as the
    engine says. "off" and objects with its fields are converted."""
    extra_args: dict[str, Any] | None = None
    """Parameters of plugged-in logits processors, by name. Over HTTP: `vllm_xargs`."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = (value,)
            if isinstance(value, list):
                value = tuple(value)
            if value is None and name != "allowed_token_ids":
                value = ()
            msgspec.structs.force_setattr(self, name, value)
        if isinstance(self.structured_outputs, dict):
            params = structured_outputs_from(self.structured_outputs)
            msgspec.structs.force_setattr(self, "structured_outputs", params)
        if isinstance(self.kv_compression, str | dict | bool):
            compression = kv_compression_from(self.kv_compression)
            msgspec.structs.force_setattr(self, "kv_compression", compression)
        self._check()

    def _check(self) -> None:
        def refuse(param: str, expected: str) -> None:
            value = getattr(self, param)
            if param == "max_tokens":
                param = self.max_tokens_field or param
            raise InvalidRequest(f"{param} must be {expected}, got {shown(value)}", param=param)

        def number(param: str) -> float:
            value = getattr(self, param)
            if isinstance(value, bool) or not isinstance(value, int | float):
                refuse(param, "a number")
            try:
                value = float(value)
            except OverflowError:
                refuse(param, "finite")
            if not math.isfinite(value):
                refuse(param, "finite")
            return float(value)

        def integer(param: str) -> int:
            value = getattr(self, param)
            if isinstance(value, bool) or not isinstance(value, int):
                refuse(param, "an integer")
            if not -(2**63) <= value < 2**63:
                refuse(param, "a 64-bit integer")
            return int(value)

        if not 1 <= integer("n") <= MAX_N:
            refuse("n", f"between 1 and {MAX_N}")
        if self.max_tokens is not None and integer("max_tokens") < 1:
            refuse("max_tokens", "at least 1")
        if integer("min_tokens") < 0:
            refuse("min_tokens", "at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", f"at most max_tokens ({self.max_tokens})")
        if not 0.0 <= number("temperature") <= 100.0:
            refuse("temperature", "between 0 and 100")
        if not 0.0 < number("top_p") <= 1.0:
            refuse("top_p", "in (0, 1]")
        if integer("top_k") < -1:
            refuse("top_k", "-1 or 0 (no limit) or positive")
        if not 0.0 <= number("min_p") <= 1.0:
            refuse("min_p", "in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= number(name) <= 2.0:
                refuse(name, "in [-2, 2]")
        if not 0.01 <= number("repetition_penalty") <= 100.0:
            refuse("repetition_penalty", "in [0.01, 100]")
        if self.seed is not None:
            integer("seed")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None and integer(name) < -1:
                refuse(name, "-1 (whole vocabulary), 0 or positive")
        if self.kv_transfer_params is not None and not isinstance(self.kv_transfer_params, dict):
            refuse("kv_transfer_params", "an object")
        if not isinstance(self.kv_compression, KVCompressionParams | None):
            refuse("kv_compression", '"off" or an object with ratio or budget')
        if self.extra_args is not None and (
            not isinstance(self.extra_args, dict)
            or not all(isinstance(key, str) for key in self.extra_args)
        ):
            refuse("extra_args", "an object with names for keys")
        if self.truncate_prompt_tokens is not None and (
            integer("truncate_prompt_tokens") < -1 or self.truncate_prompt_tokens == 0
        ):
            refuse("truncate_prompt_tokens", "-1 or positive")
        if self.truncation_side not in ("left", "right"):
            refuse("truncation_side", '"left" or "right"')
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                refuse(name, "true or false")
        if self.stream_interval is not None and integer("stream_interval") < 1:
            refuse("stream_interval", "at least 1")
        if not isinstance(self.output_kind, OutputKind):
            refuse("output_kind", "an OutputKind")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            refuse("structured_outputs", "StructuredOutputsParams or a dict of its fields")
        self._check_lists(refuse)

    def _check_lists(self, refuse: Any) -> None:
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            if not isinstance(getattr(self, name), tuple | None):
                refuse(name, "a list")
        if len(self.stop) > MAX_STOP_STRINGS:
            refuse("stop", f"at most {MAX_STOP_STRINGS} strings")
        for name, most in (
            ("stop_token_ids", MAX_STOP_TOKEN_IDS),
            ("bad_words", MAX_BAD_WORDS),
            ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS),
            ("logit_bias", MAX_LOGIT_BIAS),
        ):
            value = getattr(self, name)
            if value is not None and hasattr(value, "__len__") and len(value) > most:
                raise InvalidRequest(
                    f"{name}: must be at most {most} entries, got {len(value)}", param=name
                )
        if any(not isinstance(s, str) or not 0 < len(s) <= MAX_STOP_LENGTH for s in self.stop):
            refuse("stop", f"non-empty strings of at most {MAX_STOP_LENGTH} characters")
        if self.stop and not self.detokenize:
            refuse("stop", "empty when detokenize is off")
        if any(
            not isinstance(w, str) or not 0 < len(w) <= MAX_BAD_WORD_LENGTH for w in self.bad_words
        ):
            refuse("bad_words", f"non-empty strings of at most {MAX_BAD_WORD_LENGTH} characters")
        for name in ("stop_token_ids", "allowed_token_ids"):
            if not all_ints(getattr(self, name) or ()):
                refuse(name, "a list of integers")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            refuse("allowed_token_ids", "non-empty")
        if self.logit_bias is not None and not (
            isinstance(self.logit_bias, dict)
            and all(
                isinstance(t, int) and isinstance(b, int | float) and -100 <= b <= 100
                for t, b in self.logit_bias.items()
            )
        ):
            refuse("logit_bias", "a map of token id to a number in [-100, 100]")

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        """True if counts of earlier tokens change the logits."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def kv_compression_from(value: str | bool | dict[str, Any]) -> KVCompressionParams:
    """Build from a decoded JSON value: "off", or an object with ratio or budget. Raises
    InvalidRequest with the field's name."""
    if value == "off" or value is False:
        return KVCompressionParams(enabled=False)
    if not isinstance(value, dict):
        raise InvalidRequest(
            f'kv_compression must be "off" or an object with ratio or budget, got {shown(value)}',
            param="kv_compression",
        )
    for name in value:
        if name not in ("ratio", "budget"):
            raise InvalidRequest(
                f"kv_compression: {shown(name)} is neither ratio nor budget",
                param=f"kv_compression.{shortened(name)}",
            )
    return KVCompressionParams(**value)


def structured_outputs_from(fields: dict[str, Any]) -> StructuredOutputsParams:
    """Build from a decoded JSON object. Raises InvalidRequest with the field's name."""
    names = (*STRUCTURED_KINDS, "after_reasoning")
    for name in fields:
        if name not in names:
            raise InvalidRequest(
                f"structured_outputs: {shown(name)} is none of {', '.join(names)}",
                param=f"structured_outputs.{shortened(name)}",
            )
    return StructuredOutputsParams(**fields)
