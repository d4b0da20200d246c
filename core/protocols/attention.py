"""The contract of attention backends."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import msgspec

from ..cache.reach import Reach

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..nn.context import BatchLayout
    from ..nn.operations import Norm


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one layer, for a backend.

    A field with a default is a feature: a layer that sets it is served only by backends that list
    its name in `PagedBackend.features`. So a backend that is older than a field never ignores it
    silently.
    """

    @property
    def features(self) -> frozenset[str]:
        """Return the names of the optional fields that this layer sets."""
        return frozenset(
            name for name, default in _defaults(type(self)) if getattr(self, name) != default
        )


@functools.cache
def _defaults(spec: type[LayerSpec]) -> tuple[tuple[str, Any], ...]:
    """Return name and default of each field that has one."""
    fields = msgspec.structs.fields(spec)
    return tuple((f.name, f.default) for f in fields if f.default is not msgspec.NODEFAULT)


class AttentionSpec(LayerSpec, frozen=True, kw_only=True):
    """Parameters of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    """Each query attends to itself and the `sliding_window - 1` tokens before it."""
    attention_chunk_size: int | None = None
    """Each query attends to itself and the tokens before it in its own chunk: chunks of this many
    tokens lie at multiples of it from a sequence's first position on. Not together with
    `sliding_window`."""
    chunk_lookback: int = 0
    """With chunks, each query also attends to this many whole chunks before its own."""
    soft_cap: float | None = None
    """logits = soft_cap * tanh(logits / soft_cap)"""
    key_scale: float = 1.0
    """An fp8 cache holds keys divided by this. Read it from each call's spec: with
    `calculate_kv_scales`, it changes at the first step with tokens."""
    value_scale: float = 1.0
    """An fp8 cache holds values divided by this."""
    alibi_slopes: tuple[float, ...] | None = None
    """[num_heads] A head's slope * (key's position - query's position) is added to its logits,
    after the soft cap. Source: ALiBi (arXiv 2108.12409)."""
    sinks: bool = False
    """Each head has an additional learned logit that takes part in the softmax and has no value;
    `forward` gets them as `sinks`."""
    distance_bias: bool = False
    """A learned value by head and distance (query's position - key's) is added to each logit, after
    the soft cap; `forward` gets them as `distance_bias`. Source: T5 (arXiv 1910.10683)."""

    def __post_init__(self) -> None:
        """Raises ValueError for chunks together with a window, or a lookback without chunks."""
        if self.attention_chunk_size is None:
            if self.chunk_lookback:
                raise ValueError("chunk_lookback needs attention_chunk_size")
        elif self.sliding_window is not None:
            raise ValueError("a layer has attention_chunk_size or sliding_window, not both")

    @property
    def reach(self) -> Reach | None:
        """Which tokens a query attends to, of those up to itself; None: all."""
        if self.attention_chunk_size is not None:
            return Reach(chunk_size=self.attention_chunk_size, chunk_lookback=self.chunk_lookback)
        return None if self.sliding_window is None else Reach(self.sliding_window)


@dataclass(frozen=True)
class BackendSetup:
    """What an attention backend knows of its engine when it is created."""

    device: torch.device
    dtype: torch.dtype
    """Type of queries."""
    block_size: int
    max_num_seqs: int
    """Most rows of a step."""
    max_num_batched_tokens: int
    """Most tokens of a step."""
    max_model_len: int
    layers: Sequence[LayerSpec] = ()
    """Of the model, as this rank has them."""


@functools.cache
def _takes_setup(backend: type[PagedBackend]) -> bool:
    """Whether a constructor takes a `BackendSetup`; warn, once for each class, if it does not."""
    of_setup = {field.name for field in dataclasses.fields(BackendSetup)}
    for name, parameter in inspect.signature(backend).parameters.items():
        if name in of_setup or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            warnings.warn(
                f"attention backend {backend.name!r} ({backend.__module__}): its constructor takes "
                "the fields of BackendSetup as keywords; the next API version calls it with one "
                "BackendSetup",
                DeprecationWarning, stacklevel=3,
            )  # fmt: skip
            return False
    return True


class PagedBackend(ABC):
    """What attention backends of all kinds of caches share.

    One instance serves a model; it may keep workspaces. Block 0 of a cache is the null block:
    padding rows write there.
    """

    name: ClassVar[str]
    features: ClassVar[frozenset[str]] = frozenset()
    """Optional fields of its spec that the backend handles; `supports` may still refuse one of
    them."""
    graph_safe: ClassVar[bool] = False
    """Whether a decode-only `forward` may be captured in a CUDA graph."""
    mixed_graph_safe: ClassVar[bool] = False
    """Whether any `forward` may be captured, with a layout whose `mixed` has the values that only
    the device knows: launches then depend only on the layout's sizes and upper bounds."""
    cache_groups: ClassVar[bool] = False
    """Whether it supports layers in groups with block tables of their own: `build_metadata` is
    called for each group's layout of a step (`BatchLayout.group`), and nothing is read before a
    layer's window or chunks, where blocks may have been given back. Otherwise all layers share one
    table, and such blocks are kept."""
    fp8_cache: ClassVar[bool] = False
    """Whether it can read a float8_e4m3fn or float8_e5m2 cache, with the spec's scales."""
    bounded_lengths: ClassVar[bool] = False
    """Whether it serves layouts that are `bounded`: the host knows only upper bounds of the rows'
    lengths, as with speculative decoding; `BatchLayout.seq_lens` has the exact ones."""

    batch_invariant: ClassVar[bool] = False
    """Whether `forward` gives a token the same bits whatever the step's other tokens, those of its
    own sequence included (`EngineConfig.batch_invariant`): a prompt in one step, in chunks or after
    cached tokens, drafts, and decode rows alike."""

    @classmethod
    @abstractmethod
    def supports(cls, spec: Any, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return None if it can serve this layer here, else the reason why not, in one clause.

        Called only for layers whose features it lists, but with any other values: also with a dtype
        that is not a floating-point type, which must be refused.
        """

    @abstractmethod
    def __init__(self, setup: BackendSetup) -> None: ...

    @classmethod
    def create(cls, setup: BackendSetup) -> Self:
        """Return an instance. A constructor as in version 2 of the hooks, which has the fields of
        the setup as keywords, gets those but `layers`, which is newer; a warning says so."""
        if _takes_setup(cls):
            return cls(setup)
        return cls(**{name: value for name, value in vars(setup).items() if name != "layers"})

    @abstractmethod
    def build_metadata(self, layout: BatchLayout) -> Any:
        """Return what `forward` gets as `metadata`; called once per step (and group of layers, see
        `cache_groups`), before the first layer."""

    def prefers_launch(self, query_lens: np.ndarray, seq_lens: np.ndarray) -> bool:
        """Return whether a step of these rows, [num_rows] each, is faster launched than replayed
        from a graph: if the host knows the lengths, a better kernel may exist. Called if
        `mixed_graph_safe`."""
        return False

    def least_shared_prefix(self, num_rows: int) -> int | None:
        """Return from how many tokens on it pays that `num_rows` rows of one token each, whose
        tables begin with the same blocks, read these once (`BatchLayout.shared_prefix`). None:
        never; layouts then do not say what rows share. Asked for caches of the model's type."""
        return None


class ProjectedLayer(Protocol):
    """What `AttentionBackend.plan_projection` gets of a layer (`core.nn.attention.Attention`). Read
    its attributes at each step: scales and caches may be set later."""

    spec: AttentionSpec
    kv_cache: Any
    """As `AttentionBackend.forward` gets it."""
    norm_last: bool
    """Heads are rotated, then normed; otherwise normed, then rotated."""
    query_ring: torch.Tensor | None
    """[places, num_heads, head_dim] Where queries are kept, for KV compressors that need them."""
    next_weights: tuple[torch.Tensor, ...]
    """Weights that products read after this layer, in this order, which may be brought to a cache
    of the device meanwhile."""


class Projection(Protocol):
    """Computes a layer from its fused projection: split into heads, norm, rotate, write, attend."""

    def __call__(
        self,
        layer: ProjectedLayer,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
        metadata: Any,
        query_places: torch.Tensor | None,
        /,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; cos_sin and norms as for
        `Operations.heads`; query_places: [num_tokens] int64, of a step whose queries are kept:
        write each, normed and rotated, to this place of the layer's `query_ring`; positions:
        [num_tokens] int64 by which tokens turn; None: those in their sequences → as
        `AttentionBackend.forward`, or None, with nothing done: the step is then computed by the
        operations and `forward`."""


class AttentionBackend(PagedBackend):
    """Causal attention over a paged KV cache, prefill and decode rows in one batch. Subclass it.

    The cache of one layer is [2 (key, value), num_blocks, block_size, num_kv_heads, head_dim]. To
    test a backend: `jackfield.plugins.conformance.attention`.
    """

    features: ClassVar[frozenset[str]] = frozenset({"sliding_window", "soft_cap"})
    """Optional fields of `AttentionSpec` that the backend handles. The default is the fields of the
    first version, and does not change; `supports` may still refuse one of them."""
    cache_formats: ClassVar[frozenset[str]] = frozenset()
    """Quantized formats that it can read (`core.cache.formats`): `forward` then gets a
    `QuantizedCache` for layers that store one. Without this, it gets tensors alone."""
    standard_cache: ClassVar[bool] = True
    """Whether the cache has the layout above, with the step's keys and values written before
    `forward` is called; otherwise `forward` writes them."""
    compacted_cache: ClassVar[bool] = False
    """Whether `forward` serves rows whose cache was compacted (`EngineConfig.kv_compression`): it
    has fewer tokens than the sequence, chosen anew for each KV head. Such a row computes one token,
    which attends to all that `seq_lens` counts. Needs `standard_cache`. A planned projection then
    takes positions from `BatchLayout.positions`, as they do not follow from lengths."""
    leveled_cache: ClassVar[bool] = False
    """Whether `forward` attends to tokens in fewer bits, too, in layers without a window or chunks
    (`BatchLayout.levels`): all queries of a row see all of them. Needs `compacted_cache`."""

    @classmethod
    @abstractmethod
    def supports(cls, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return None if it can serve this layer here, else the reason why not, in one clause.

        Called only for layers whose features it lists, but with any other values: also with
        `num_heads` that is not a multiple of `num_kv_heads`, and with a dtype that is not a
        floating-point type. Both must be refused.
        """

    @abstractmethod
    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: Any,
        metadata: Any,
        *,
        sinks: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the cache. If `standard_cache` is false, write key and value to it first.

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim];
        kv_cache: the tensor above, or, for `cache_formats`, a `QuantizedCache`
        (`core.nn.kv_cache.quantized_cache`); sinks: [num_heads]; distance_bias: [num_heads,
        num_distances], the last one for all distances from it on. Both are given only for layers
        whose spec has them (a backend without that feature needs no such argument)
        → [num_tokens, num_heads, head_dim]
        """

    def plan_projection(self, layer: ProjectedLayer) -> Projection | None:
        """Return what computes this layer from its fused projection; None (the default): all its
        steps are computed by the operations and `forward`.

        Called once for each layer, after loading; not for layers with sinks or biases by distance.
        The layer keeps what is returned, which gets the layer at each step and does not keep it.
        """
        return None
