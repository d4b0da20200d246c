"""What each kind of plugin must be: the typed contracts behind the hooks of `hooks.py`.

Torch is imported for type checking only, so that finding plugins stays cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from .types import StepPlan, StepResult

if TYPE_CHECKING:
    import asyncio

    import numpy as np
    import torch
    from torch import nn

    from .config import EngineConfig
    from .loading.model_config import ModelConfig
    from .nn.context import BatchLayout, BuildContext, ForwardContext
    from .nn.operations import Norm
    from .registry import Plugins
    from .scheduling.request import Request


# ---------------------------------------------------------------- models


@runtime_checkable
class Model(Protocol):
    """An architecture, composed of `core.nn` blocks. Subclasses `torch.nn.Module`.

    `weight_map` is data: which checkpoint names stack into which parameter
    (`core.loading.weight_map`).
    """

    weight_map: ClassVar[Any]

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """Create parameters (uninitialised) on `build.device` in `build.dtype`."""

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """input_ids: [num_tokens] int64 → hidden states [num_tokens, hidden_size].

        Whatever only `compute_logits` needs (the last norm) is left to it: it sees few rows.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [num_rows, hidden_size] → logits [num_rows, vocab_size], any float dtype."""


# ---------------------------------------------------------------- attention


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's attention, as a backend needs to know it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    """Each query sees itself and the `sliding_window - 1` tokens before it."""
    soft_cap: float | None = None
    """logits = soft_cap * tanh(logits / soft_cap)"""


class AttentionBackend(Protocol):
    """Causal attention over a paged KV cache, prefill and decode rows in one batch.

    One instance serves a model; it may keep workspaces. The cache of one layer is
    [2 (key, value), num_blocks, block_size, num_kv_heads, head_dim]. Block 0 is the null block:
    padding rows write there.
    """

    name: ClassVar[str]
    graph_safe: ClassVar[bool]
    """Whether a decode-only `forward` may be captured in a CUDA graph."""
    standard_cache: ClassVar[bool]
    """The cache has the layout above, and the step's keys and values are in it when `forward` is
    called; otherwise writing them is up to `forward`."""

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        """None when it can serve this layer here, else the reason why not, in one clause."""

    def __init__(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None: ...

    def build_metadata(self, layout: BatchLayout) -> Any:
        """Once a step, before the first layer; what `forward` gets as `metadata`."""

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        """Attend to the cache. Where `standard_cache` is false, write key and value to it first.

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim]
        → [num_tokens, num_heads, head_dim]
        """

    def forward_projection(
        self,
        spec: AttentionSpec,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
        kv_cache: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor | None:
        """All of it from the fused projection: cut into heads, norm, rotate, write, attend.

        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; the rest as for
        `Operations.heads`. → as `forward`, or None, with nothing done, if this backend leaves
        such a step to the operations and `forward`. Optional: a backend need not have it.
        """


# ---------------------------------------------------------------- quantization


class QuantizationMethod(Protocol):
    """A checkpoint format: how a linear layer stores and applies its weight."""

    name: ClassVar[str]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationMethod:
        """From the checkpoint's `quantization_config`. Raises ConfigError with the field's name."""

    def linear_parameters(
        self, prefix: str, in_features: int, out_features: int, dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Parameters to create for the layer named `prefix`."""

    def process_weights(self, layer: nn.Module) -> None:
        """Once after loading: repack, transpose, compute scales."""

    def apply_linear(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x: [num_tokens, in_features] → [num_tokens, out_features]"""


# ---------------------------------------------------------------- parsers


class Content(msgspec.Struct, frozen=True, tag="content"):
    """Text of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    """Text of the thought."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, tag="tool_call_start"):
    """A tool call begins; its name is known."""

    index: int
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, tag="tool_call_arguments"):
    """The next fragment of a call's arguments, as JSON text."""

    index: int
    fragment: str


class ToolCallEnd(msgspec.Struct, frozen=True, tag="tool_call_end"):
    """A tool call is complete."""

    index: int


ParserEvent: TypeAlias = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd


class ReasoningParser(Protocol):
    """Splits thought from answer, for one request. Any cutting of the text gives the same fold.

    Never raises on text; linear time; events are `Content` and `Reasoning`.

    A class may have two more attributes. `markers: tuple[str, ...]`: texts it looks for that may be
    special tokens, which are shown to it then. `thinking_switch: tuple[str, bool]`: the chat
    template's argument that turns thinking on or off, and what the template does without it;
    default ("enable_thinking", True).
    """

    reasoning_ended: bool
    """Whether thought is over, or none is to come: what follows the text fed so far is answer, and
    a grammar may hold from here. True as early as the text allows; once true, it stays true."""

    def __init__(self, *, thinking: bool = True) -> None:
        """`thinking`: whether the template lets this request think."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]: ...

    def finish(self) -> list[ParserEvent]: ...


class ToolParser(Protocol):
    """Finds tool calls in the answer, for one request. Rules as for `ReasoningParser`.

    Events are `Content`, `ToolCallStart`, `ToolCallArguments`, `ToolCallEnd`.

    A class may have `call_form: tuple[str, str, str]`: what begins every call, what its family
    writes before a call's arguments (`{name}` stands for the name inside JSON quotes), and what
    after, none of it special tokens. With it, tools marked `strict` are held to their schemas by a
    grammar.
    """

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools`: the request's tools in OpenAI's form, for typing arguments."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]: ...

    def finish(self) -> list[ParserEvent]: ...


# ---------------------------------------------------------------- structured outputs


class GrammarSpec(msgspec.Struct, frozen=True):
    """What an output has to look like, in one canonical form; the key of the cache."""

    kind: Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
    text: str = ""
    """json, structural_tag: JSON text; choice: a JSON list of strings; json_object: empty."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that a grammar chooses among."""

    token_bytes: list[bytes]
    """[size] What each id adds to a text; empty for special tokens and ids without a token, which
    no grammar allows."""
    size: int
    """The model's vocab_size, which may be larger than the tokenizer's."""
    eos_token_ids: tuple[int, ...]
    """Allowed where a grammar may end, and only there. At least one."""
    encode: Callable[[str], list[int]]
    """Text to token ids, without special tokens."""
    compact_json: bool = False
    """JSON has one form: no whitespace but one space after each comma and colon."""


class GrammarMatcher(Protocol):
    """One output on its way through a grammar. Used by one thread at a time."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Go on by these tokens. False: the grammar does not allow them.

        Raises RuntimeError when the grammar is past the backend's limits.
        """

    def fill_bitmask(self, row: np.ndarray) -> None:
        """Write which tokens may come next. Not called once an end token was accepted.

        row: [ceil(size / 32)] int32, contiguous; bit i % 32 of word i // 32 is token i. Every bit
        is written, those past `size` too (as 0). Raises RuntimeError as `accept` does.
        """

    def is_terminated(self) -> bool:
        """Whether an end token was accepted."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens. Optional: a matcher need not have it."""


class Grammar(Protocol):
    """A compiled grammar; shared by requests."""

    def matcher(self) -> GrammarMatcher:
        """A new one, at the beginning."""


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary."""

    bounded: ClassVar[bool]
    """Whether `compile` and `fill_bitmask` end in little time and memory whatever they are given.
    Otherwise a costly grammar is tried in a process of its own first."""

    @classmethod
    def unavailable(cls) -> str | None:
        """None when it can be used here, else the reason, in one clause."""

    @classmethod
    def refusal(cls, spec: GrammarSpec) -> str | None:
        """Why it cannot hold an output to this, in one clause; None when it may try."""

    def __init__(self, vocabulary: Vocabulary) -> None: ...

    def compile(self, spec: GrammarSpec) -> Grammar:
        """On a thread of a pool. Raises ValueError with what is wrong with the grammar."""


# ---------------------------------------------------------------- loading and running


class WeightLoader(Protocol):
    """Yields a checkpoint's tensors by name."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None: ...

    def load(self, model: nn.Module, device: torch.device) -> None:
        """Fill every parameter of `model`. Raises LoadError naming what is missing or unknown."""


class Executor(Protocol):
    """Where the ranks run. The event loop talks to the worker through this alone."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, plugins: Plugins
    ) -> None: ...

    async def start(self) -> ExecutorInfo:
        """Load the model, size the cache, warm up."""

    def submit(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Queue one step; plans run in order. The future fails if the step as a whole does."""

    async def stop(self) -> None:
        """Finish what is queued, free the device. Safe to call twice."""


class ExecutorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine learns from a started executor."""

    num_blocks: int
    """KV blocks, the null block included."""
    device: str
    dtype: str
    attention_backend: str
    attention_reason: str
    """Why this backend was chosen, in one clause."""
    weight_bytes: int
    kv_cache_bytes: int
    load_seconds: float


class SchedulePolicy(Protocol):
    """Who goes first, and who is preempted."""

    def key(self, request: Request) -> tuple[Any, ...]:
        """Smallest first. The victim of a preemption is the running request with the largest.

        Asked once, when the request is added: the answer holds for its life. Equal keys: by
        order of addition.
        """


# ---------------------------------------------------------------- specified, not called yet


class KVConnector(Protocol):
    """KV blocks from and to elsewhere. Scheduler half (pure) and worker half (tensors)."""

    def num_external_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Scheduler half: tokens past `num_computed_tokens` that the far side has."""

    def load(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Worker half: start filling these blocks."""

    def save(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Worker half: start storing these blocks."""


class KVCompressor(Protocol):
    """Which cached KV may be dropped or merged."""

    def compress(self, kv_cache: torch.Tensor, layout: BatchLayout) -> None: ...


class Speculator(Protocol):
    """Proposes draft tokens."""

    def propose(self, layout: BatchLayout) -> torch.Tensor:
        """→ [num_rows, num_draft_tokens]"""


class LogitsProcessor(Protocol):
    """Changes logits in a batch, before sampling."""

    def apply(self, logits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """logits: [num_rows, vocab_size] float32; slots: [num_rows] → logits, may be in place."""


WeightIterator: TypeAlias = Iterator[tuple[str, "torch.Tensor"]]
Named: TypeAlias = Iterable[tuple[str, object]]
