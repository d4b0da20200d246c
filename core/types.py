"""What travels: sampling parameters in, step plans to the worker, step results back, outputs out.

`SamplingParams → Request → StepPlan → StepResult → RequestOutput`. Everything here is a plain
`msgspec.Struct` without torch, so a plan can be recorded, replayed and simulated anywhere.
"""

from __future__ import annotations

import enum
import math
from typing import Any, Literal, TypeAlias, TypedDict

import msgspec

from .errors import InvalidRequest, shown
from .pooling import PooledRow, PoolingOutput, PoolingParams

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


class OutputKind(enum.StrEnum):
    """What each `RequestOutput` of a stream holds."""

    CUMULATIVE = "cumulative"
    """All text and tokens so far."""
    DELTA = "delta"
    """Only what is new since the last one."""
    FINAL_ONLY = "final_only"
    """One output, at the end."""


MAX_LOGPROBS = 20
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
    """Whether these are integers and no booleans."""
    return set(map(type, values)) <= {int}


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """What the output has to look like: exactly one of the kinds. Names are vLLM's.

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
    """Whether the grammar begins where the thought ends. None: in a chat with a reasoning parser,
    yes; in a completion, no."""
    strict: bool | None = None
    """Of schemas: refuse formats and keywords that no output can be held to, by name, instead of
    leaving them unchecked."""
    field: str = ""
    """What the caller calls it, for errors; default: `structured_outputs` and the kind."""

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))
        given = [name for name in STRUCTURED_KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:
            given.insert(0, "json")
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidRequest(
                f"structured_outputs: exactly one of {', '.join(STRUCTURED_KINDS)} must be given, "
                f"got {found}",
                param="structured_outputs",
            )
        (kind,) = given
        value = getattr(self, kind)
        wanted: Any = {
            "json": (str, dict, bool),
            "choice": tuple,
            "json_object": bool,
            "structural_tag": (str, dict),
        }.get(kind, str)
        if not isinstance(value, wanted) or value in ("", ()):
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


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens for one request. Names and defaults are vLLM's.

    Raises `InvalidRequest` with the field's name when a value is out of range.
    """

    n: int = 1
    """Completions for the prompt."""
    max_tokens: int | None = None
    """Tokens to generate at most; None: as many as the context leaves."""
    max_tokens_field: str | None = None
    """What the caller calls `max_tokens`: more than the context leaves is then refused under that
    name. None: as many as it leaves are generated."""
    min_tokens: int = 0
    """No stop (EOS, stop ids, stop strings) before so many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the most likely tokens whose probabilities together reach this; in (0, 1]."""
    top_k: int = 0
    """0 or -1: no limit."""
    min_p: float = 0.0
    """Keep tokens at least this probable, relative to the most probable one."""
    seed: int | None = None
    """Same seed, same tokens, whatever else is in the batch."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that the output has already; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """The same, times how often the output has it; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Above 1: tokens of prompt and output become less likely; in [0.01, 100]."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; cut off unless `include_stop_str_in_output`."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, besides the model's EOS."""
    include_stop_str_in_output: bool = False
    """Leave the stop string, or the stop token's text, in the output."""
    ignore_eos: bool = False
    """Go on after the model's EOS."""
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
    """Words whose last token may not be sampled after the ones before it."""
    structured_outputs: StructuredOutputsParams | None = None
    """A schema, expression or grammar that the output follows."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces around special tokens that are shown, where the tokenizer does."""
    detokenize: bool = True
    """Off: token ids only, no text (and no stop strings)."""
    truncate_prompt_tokens: int | None = None
    """Keep only so many prompt tokens; -1: as many as the context holds."""
    truncation_side: Literal["left", "right"] = "left"
    """Where the prompt is cut: left keeps its last tokens."""
    output_kind: OutputKind = OutputKind.CUMULATIVE
    """What each output of the stream holds: see `OutputKind`."""
    kv_transfer_params: dict[str, Any] | None = None
    """For the KV connector: what it makes of them is its own matter."""
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
            made = structured_outputs_from(self.structured_outputs)
            msgspec.structs.force_setattr(self, "structured_outputs", made)
        self._check()

    def _check(self) -> None:
        def refuse(param: str, wanted: str) -> None:
            given = getattr(self, param)
            if param == "max_tokens":
                param = self.max_tokens_field or param
            raise InvalidRequest(f"{param} must be {wanted}, got {shown(given)}", param=param)

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
            given = getattr(self, name)
            if given is not None and hasattr(given, "__len__") and len(given) > most:
                raise InvalidRequest(
                    f"{name}: must be at most {most} entries, got {len(given)}", param=name
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
        """True when the most likely token is always taken."""
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        """True when counts of earlier tokens change the logits."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def structured_outputs_from(given: dict[str, Any]) -> StructuredOutputsParams:
    """From a decoded JSON object. Raises InvalidRequest with the field's name."""
    known = (*STRUCTURED_KINDS, "after_reasoning")
    for name in given:
        if name not in known:
            raise InvalidRequest(
                f"structured_outputs: {name!r} is none of {', '.join(known)}",
                param=f"structured_outputs.{name}",
            )
    return StructuredOutputsParams(**given)


class TokensPrompt(TypedDict):
    """A prompt given as token ids."""

    prompt_token_ids: list[int]


Prompt: TypeAlias = str | list[int] | TokensPrompt
ChatMessage: TypeAlias = dict[str, Any]


# ---------------------------------------------------------------- loop → worker


class GrammarStart(msgspec.Struct, frozen=True, kw_only=True):
    """How a slot's output is held to a grammar."""

    grammar: Any
    """The compiled grammar (`protocols.Grammar`): an object of this process. An executor elsewhere
    compiles `SlotStart.params.structured_outputs` itself."""
    eos_token_ids: tuple[int, ...]
    """Allowed where the grammar may end, and only there."""
    token_bytes: Any
    """(token id) → the bytes that it adds to a text"""
    encode: Any = None
    """(text) → token ids, for what is answer already when a thought ends"""
    thought: Any = None
    """`core.structured.thought.Thought`: the grammar begins where it ends."""


class SlotStart(msgspec.Struct, frozen=True):
    """A request takes a slot: newly admitted, or resumed after preemption."""

    slot: int
    request_id: str
    token_ids: tuple[int, ...]
    """Every token known: the prompt, and what was generated before a preemption."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is already in `block_ids` (prefix-cache hits)."""
    block_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """Seed of the request's counter-based random numbers (drawn at admission when not given)."""
    stop_token_ids: tuple[int, ...] = ()
    """EOS and stop ids; masked while fewer than `params.min_tokens` tokens are out."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarStart | None = None
    pooling: PoolingParams | None = None
    """Of a pooling request, its defaults filled in: a vector takes the place of sampled tokens."""
    token_type_ids: tuple[int, ...] = ()
    """[len(token_ids)] Which of two texts each token belongs to, for encoders; empty: all 0."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step of work: the whole contract between the event loop and the worker.

    It carries differences: a slot's tokens, blocks and parameters travel once. Applied in order:
    `released`, `starts`, `appended_blocks`; then rows run as given by `slots`/`num_tokens`.
    """

    step: int
    slots: tuple[int, ...]
    """[num_rows] Each scheduled row's slot. Decode rows (one token) come before prefill rows."""
    num_tokens: tuple[int, ...]
    """[num_rows] Tokens to compute for each row, from where the row's slot stands."""
    samples: tuple[bool, ...]
    """[num_rows] Whether the row reaches its last known token, so that a token is sampled, or
    the request pooled."""
    released: tuple[int, ...] = ()
    """Slots whose request ended or was preempted."""
    starts: tuple[SlotStart, ...] = ()
    appended_blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(slot, new block ids) for running slots whose block table grew."""
    kv_metadata: Any = None
    """From the KV connector's scheduler half to its worker half. A plan may have nothing else."""

    @property
    def total_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(self.num_tokens)


# ---------------------------------------------------------------- worker → loop


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position, from the model's raw logits (before any processing)."""

    token_id: int
    """The sampled token (or the prompt token)."""
    logprob: float
    rank: int
    """1 for the most likely token."""
    top_ids: list[int]
    """[k], most likely first."""
    top_logprobs: list[float]
    """[k]"""


class KVReport(msgspec.Struct, frozen=True):
    """What has become of KV transfers, from a connector's worker half to the scheduler."""

    finished: tuple[int, ...] = ()
    """Transfers that have ended well: their blocks are neither read nor written any more."""
    failed: dict[int, tuple[int, ...]] = {}
    """Transfers that have ended otherwise → the block ids that were not filled (of a load)."""
    payload: Any = None
    """For the connector's scheduler half, whatever it is."""


class StepResult(msgspec.Struct, frozen=True):
    """What a step produced, row by row as in its plan."""

    step: int
    token_ids: list[int]
    """[num_rows] The sampled token, or -1 where the row does not sample."""
    logprobs: dict[int, TokenLogprobs] = {}
    """Row → log-probabilities of its sampled token, where asked for."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """Row → log-probabilities of the prompt tokens that FOLLOW the positions computed in this
    step (position p predicts token p + 1), in order, where asked for."""
    failed: dict[int, str] = {}
    """Row → why this row alone failed."""
    pooled: dict[int, PooledRow] = {}
    """Row → the result of a pooling request whose prompt is computed."""
    device_seconds: float = 0.0
    """Launch to result, as the worker saw it."""
    kv_report: KVReport | None = None
    """KV transfers that have ended since the last one."""
    late_preparations: int = 0
    """Kernels compiled or loaded, and graphs recorded, while this step was launched."""


# ---------------------------------------------------------------- engine → caller


class Logprob(msgspec.Struct, frozen=True):
    """Log-probability of one token at one position."""

    logprob: float
    """Natural logarithm of the probability."""
    rank: int | None = None
    """1 for the most likely token."""
    decoded_token: str | None = None
    """The token's text; None without a tokenizer."""


PositionLogprobs: TypeAlias = dict[int, Logprob]
"""Token id → Logprob: the position's own token, then the most likely ones."""


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of the `n` completions of a request."""

    index: int
    """0 to n - 1."""
    text: str = ""
    """What was generated: all so far, or what is new (`OutputKind`)."""
    token_ids: list[int] = []
    """The same as ids; the token that ended it is among them."""
    logprobs: list[PositionLogprobs] | None = None
    """[len(token_ids)], where `logprobs` were asked for."""
    cumulative_logprob: float | None = None
    """Sum over all tokens so far, where `logprobs` were asked for."""
    finish_reason: FinishReason | None = None
    """None while it grows."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for EOS and everything else."""


class RequestTimings(msgspec.Struct, kw_only=True):
    """Monotonic times in seconds (`time.monotonic`)."""

    arrival: float
    """When the engine took the request."""
    first_scheduled: float | None = None
    """When its first tokens were planned."""
    first_token: float | None = None
    """When the first token came back."""
    last_token: float | None = None
    """When the latest token came back."""
    finished: float | None = None
    """When the last completion ended."""
    num_preemptions: int = 0
    """How often its completions lost their blocks and were computed again."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """What `AsyncEngine.generate` yields."""

    request_id: str
    """The caller's, or a random one."""
    prompt: str | None = None
    """The prompt's text, where text was given."""
    prompt_token_ids: list[int]
    """The prompt as the model saw it."""
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """[num_prompt_tokens]; the first is None, for nothing precedes it."""
    outputs: list[CompletionOutput]
    """All `n` completions; in delta mode those with something new."""
    finished: bool
    """Whether all completions have ended; the last output of a stream."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    timings: RequestTimings
    """When what happened."""
    error: str | None = None
    """Why, when a finish_reason is "error"."""
    kv_transfer_params: dict[str, Any] | None = None
    """What the KV connector gave out when the request ended."""


class PoolingRequestOutput(msgspec.Struct, kw_only=True):
    """What `AsyncEngine.encode` yields, once a request."""

    request_id: str
    """The caller's, or a random one."""
    prompt: str | None = None
    """The prompt's text, where text was given."""
    prompt_token_ids: list[int]
    """The prompt as the model saw it."""
    outputs: PoolingOutput
    """One request, one result; the name is vLLM's."""
    finished: bool = True
    """There is no output before the last."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    timings: RequestTimings
    """When what happened."""


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot of the engine, cheap to take."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_slots: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    """Held by requests. Cached blocks that nobody holds count as free."""
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up, since the start."""
    prefix_cache_hits: int = 0
    """Prompt tokens found, since the start."""
    external_prefix_cache_queries: int = 0
    """Prompt tokens past those that the KV connector was asked for, since the start."""
    external_prefix_cache_hits: int = 0
    """Tokens that the KV connector loaded, since the start."""
    num_kv_load_failures: int = 0
    """Loads of the KV connector that brought less than it had promised, since the start."""
    num_preemptions: int = 0
    late_preparations: int = 0
    """Kernels compiled or loaded, and graphs recorded, in steps that waited for it, since the
    start."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    requests_finished: dict[str, int] = {}
    """finish_reason → count, since the start."""
