"""What each kind of plugin must be: the typed contracts behind the hooks of `hooks.py`.

Torch is imported for type checking only, so that finding plugins stays cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from .types import StepPlan, StepResult

if TYPE_CHECKING:
    import asyncio

    import torch
    from torch import nn

    from .config import EngineConfig
    from .loading.model_config import ModelConfig
    from .nn.context import BatchLayout, BuildContext, ForwardContext
    from .nn.operations import Norm
    from .nn.quantized import LinearSpec, QuantizedLinear
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
    key_scale: float = 1.0
    """An fp8 cache holds keys divided by this."""
    value_scale: float = 1.0
    """An fp8 cache holds values divided by this."""


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
    fp8_cache: ClassVar[bool]
    """It can read a float8_e4m3fn or float8_e5m2 cache, with the spec's scales. Optional: a backend
    without the attribute cannot."""

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
    """A way to store and apply weights: a checkpoint format, or a rounding done at load.

    One instance serves a model. It decides, layer by layer, what takes a layer's place:
    `core.nn.quantized` has what such layers subclass, `core.nn.packed` the layouts that the
    operations multiply by; a method that repacks into one of these needs no kernel of its own.
    Layers of mixture-of-experts models are not among `core.nn`'s blocks yet: they will come with
    a role of their own, so answer None to a role that you do not know. Scales of an fp8 cache need
    no method: the checkpoint's `k_scale` and `v_scale` go to the attention layers.
    """

    name: ClassVar[str]
    kv_cache_dtype: str | None
    """What `EngineConfig.kv_cache_dtype` "auto" becomes, where the checkpoint wants another than
    the model's type. Optional."""

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """None when it can run here, else the reason why not, in one clause."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QuantizationMethod:
        """From the checkpoint's `quantization_config`; empty where it has none (the method was
        named in `EngineConfig.quantization`). Raises ConfigError with the field's name.
        """

    def layer(self, spec: LinearSpec) -> QuantizedLinear | None:
        """What takes the place of the layer `spec`; None: it stays as it is."""


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
    """

    def __init__(self, *, thinking: bool = True) -> None:
        """`thinking`: whether the template lets this request think."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]: ...

    def finish(self) -> list[ParserEvent]: ...


class ToolParser(Protocol):
    """Finds tool calls in the answer, for one request. Rules as for `ReasoningParser`.

    Events are `Content`, `ToolCallStart`, `ToolCallArguments`, `ToolCallEnd`.
    """

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools`: the request's tools in OpenAI's form, for typing arguments."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[ParserEvent]: ...

    def finish(self) -> list[ParserEvent]: ...


# ---------------------------------------------------------------- loading and running


class WeightLoader(Protocol):
    """Yields a checkpoint's tensors by name."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None: ...

    def load(self, model: nn.Module, device: torch.device) -> None:
        """Fill every parameter of `model`, and process each of its quantized layers
        (`core.loading.weight_map.ParameterFiller` does both, from named tensors).

        Raises LoadError naming what is missing or unknown.
        """


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


class GrammarBackend(Protocol):
    """Compiles a grammar and fills token bitmasks."""

    def compile(self, kind: Literal["json", "regex", "choice", "grammar"], text: str) -> Any: ...


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
