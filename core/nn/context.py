"""Contexts that are passed to building blocks: for building a model, and for a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..cache.level_options import LevelFormat
from ..parallel.expert_share import ExpertShare
from ..parallel.ranks import Ranks
from ..parallel.sharding import even_slice
from ..parts import encoder_decoder, input_embeds, kv_compression, speculation
from ..protocols.attention import AttentionBackend, AttentionSpec, PagedBackend
from .input_embeds import InputEmbedsContext
from .operations import Operations
from .ragged import RaggedRows
from .spans import Span
from .state.rows import StateRows

if TYPE_CHECKING:
    from .rotary import Rotary


@dataclass(frozen=True)
class BuildContext:
    """How to create parameters."""

    device: torch.device
    dtype: torch.dtype
    operations: Operations
    defer_weights: bool = False
    """Allocate no memory for weights yet: a quantization method may replace the layer."""
    ranks: Ranks = field(default_factory=Ranks)
    """The ranks that compute the model together."""
    unit: int = 1
    """Inner features of an MLP that a quantization method stores together: ranks get whole ones."""

    every_token: bool = False
    """All layers compute all tokens, also where only those that sample are needed: something else
    than a later layer reads what is computed."""
    redundant_experts: int | None = None
    """Copies of a layer's experts, beyond one each, that are placed by load; None: experts stay
    where they are loaded."""

    def inner_share(self, size: int) -> slice:
        """Return this rank's inner features of an MLP that has `size`. Raises ConfigError."""
        return even_slice(size, self.ranks.tensor, unit=self.unit)

    def expert_share(self, num_experts: int) -> ExpertShare | None:
        """Return the experts of a layer that this rank holds; None: a part of each. Raises
        ConfigError."""
        group = self.ranks.experts
        if group.size == 1:
            return None
        return ExpertShare.of(num_experts, group, self.redundant_experts)

    def empty(self, *shape: int) -> torch.Tensor:
        """Return an uninitialised parameter."""
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def weight(self, *shape: int) -> torch.Tensor:
        """Return an uninitialised matrix, for blocks that a quantization method can replace."""
        device = torch.device("meta") if self.defer_weights else self.device
        return torch.empty(shape, device=device, dtype=self.dtype)


@dataclass(frozen=True)
class MixedRows:
    """The first row of a recorded step that is not a decode row, known only on the device.

    Decode rows (one token each) come first, so row r is one if query_start[r + 1] is r + 1.
    """

    bounds: torch.Tensor
    """[2] int32: the first row that is not a decode row, and the number of rows from it on."""
    max_decode_rows: int
    """Most decode rows; 0: there are none."""
    max_prompt_rows: int
    """Most rows that are not decode rows, padding included."""
    width: int = 0
    """Tokens of every row, if there are no decode rows and all have as many; 0: any."""


class CacheLevels(NamedTuple):
    """Tokens of caches in fewer bits: blocks of levels are the first ones of a slot's table, those
    of the first level before those of the next (`core.cache.levels`). Layers that see all tokens
    have them; what layers with a window or chunks see is never in a level."""

    formats: tuple[LevelFormat, ...]
    """[L]"""
    tokens: torch.Tensor
    """[num_slots + 1, L] int32: those of each slot."""


@dataclass(frozen=True)
class BatchLayout:
    """One step's rows and tokens. Tensors live on the device; `*_cpu` twins are numpy.

    R = num_rows, T = num_tokens, B = blocks a request may hold.
    """

    num_rows: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start: torch.Tensor
    """[R + 1] int32: row r's tokens are query_start[r] .. query_start[r + 1]."""
    seq_lens: torch.Tensor
    """[R] int32: tokens in the cache once this step has written its own."""
    block_table: torch.Tensor
    """[R, B] int32"""
    slot_mapping: torch.Tensor
    """[T] int64: block * block_size + offset, where each token's KV goes."""
    query_start_cpu: np.ndarray
    """As `query_start`. With `mixed`: as if no row had tokens."""
    seq_lens_cpu: np.ndarray
    """As `seq_lens`. With `mixed`, and in recorded decode steps: upper bounds."""
    positions: torch.Tensor | None = None
    """[T] int64: each token's position in its sequence, where caches may have lost tokens (KV
    compression); None: token i of a cache is at position i."""
    mixed: MixedRows | None = None
    """Set for a recorded step that may hold prompts: lengths and starts are only in device memory.
    Only backends that are `mixed_graph_safe` get it. Rows without tokens come last."""
    bounded: bool = False
    """Whether `seq_lens_cpu` has upper bounds alone, because drafts of earlier steps were counted
    whose verdict the host does not know yet."""
    group: int = 0
    """Number of the cache group whose block table this is."""
    slots: torch.Tensor | None = None
    """[R] int32 or int64: each row's slot, padding rows' the last; for layers that keep states."""
    levels: CacheLevels | None = None
    """Given with `slots`, if tokens of caches move to levels (`AttentionBackend.leveled_cache`).
    Then `seq_lens` counts a block of a level as `block_size` tokens, as places in the cache do."""
    shared_prefix: torch.Tensor | None = None
    """[1] int32: as many leading tokens are in the same blocks in all rows of one token that come
    first, padding apart, in layers that see all tokens; fewer than each of them has. None: it does
    not matter (`PagedBackend.least_shared_prefix`)."""

    @classmethod
    def of(
        cls,
        *,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
        query_start_cpu: np.ndarray,
        seq_lens_cpu: np.ndarray,
        max_query_len: int | None = None,
        block_size: int | None = None,
        group: int = 0,
        mixed: MixedRows | None = None,
        positions: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        levels: CacheLevels | None = None,
        bounded: bool = False,
        shared_prefix: torch.Tensor | None = None,
    ) -> BatchLayout:
        """Create a layout from the tensors and their twins. The only place that does.

        max_query_len: given if the host does not know the rows' starts. block_size: truncate the
        block table to the columns that rows of these lengths have; None: do not truncate it.
        """
        max_seq_len = int(seq_lens_cpu.max())
        if max_query_len is None:
            max_query_len = int(np.diff(query_start_cpu).max())
        if block_size is not None:
            block_table = block_table[:, : -(-max_seq_len // block_size)]
        return cls(
            num_rows=len(seq_lens_cpu),
            num_tokens=slot_mapping.shape[0],
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            query_start=query_start,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=slot_mapping,
            query_start_cpu=query_start_cpu,
            seq_lens_cpu=seq_lens_cpu,
            positions=positions,
            mixed=mixed,
            bounded=bounded,
            group=group,
            slots=slots,
            levels=levels,
            shared_prefix=shared_prefix,
        )

    @property
    def places(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that kernels use as memory locations or as lengths."""
        own = () if self.slots is None else (self.slots,)
        return self.seq_lens, self.block_table, self.slot_mapping, *own

    @cached_property
    def state_rows(self) -> StateRows:
        """The rows, for layers that keep states."""
        assert self.slots is not None, "layers with states get the slots of rows"
        return StateRows(
            num_tokens=self.num_tokens,
            slots=self.slots,
            query_start=self.query_start,
            seq_lens=self.seq_lens,
            query_start_cpu=self.query_start_cpu,
            max_query_len=self.max_query_len,
            mixed=self.mixed is not None,
        )

    @property
    def decode_only(self) -> bool:
        """Whether every row computes one token."""
        return self.max_query_len == 1


class QueryPlaces(NamedTuple):
    """Which queries of a step are kept, K of them: see `Attention.query_ring`."""

    tokens: torch.Tensor | None
    """[K] int64: the step's token of each; None: all tokens, in order."""
    places: torch.Tensor
    """[K] int64: index into a layer's ring. Those that are not kept share a place."""


class Taps(NamedTuple):
    """Inputs of layers that a speculator reads, kept while the target's step is computed."""

    columns: Mapping[int, slice]
    """Layer → its columns."""
    states: torch.Tensor
    """[most tokens, number of taps * hidden_size]"""

    def keep(self, layer: int, hidden: torch.Tensor) -> None:
        """Copy what enters a layer, [num_tokens, hidden_size], if it is read. A recorded step may
        have more tokens than a step, as padding."""
        if (columns := self.columns.get(layer)) is not None:
            count = min(len(hidden), len(self.states))
            self.states[:count, columns].copy_(hidden[:count])


class GroupContext(NamedTuple):
    """Data that the layers of one cache group share in a step."""

    layout: BatchLayout
    metadata: Any
    """The attention backend's metadata, made from the layout."""


class SourceContext(NamedTuple):
    """Data that the layers that attend to sources share in a step."""

    backend: AttentionBackend
    """One of its own: its rows are tokens."""
    metadata: Any
    """The backend's metadata, made from `PersistentBatch.source_layout`."""


class EncodeContext(NamedTuple):
    """The sources that an encoder-decoder model encodes together, S tokens."""

    positions: torch.Tensor
    """[S] int64: of each token in its source"""
    rows: RaggedRows
    slot_mapping: torch.Tensor
    """[S] int64: block * block_size + offset, where each token's keys and values go."""


@dataclass(frozen=True)
class ForwardContext:
    """Passed down through a forward call: no globals."""

    backend: PagedBackend | None
    """None in an encoder, which has no cache to attend to."""
    metadata: Any
    """The attention backend's metadata, made from the layout."""
    layout: BatchLayout
    """Layout of the first cache group; its rows are those of all groups."""
    positions: torch.Tensor
    """[num_tokens] int64"""
    token_type_ids: torch.Tensor | None = None
    """[num_tokens] int64, for encoders of two texts; None: all 0."""
    precompiling: bool = False
    """Kernels are only compiled: a layer with an earlier one's launches may be skipped."""
    more_groups: tuple[GroupContext, ...] = ()
    """Contexts of the cache groups after the first."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """Name of a part → what its worker half says of the step (`WorkerPart.context`)."""
    shared: dict[str, Any] = field(default_factory=dict)
    """What layers hand to later ones of the same forward call, by names of a family's own; empty
    between calls."""

    @property
    def query_places(self) -> QueryPlaces | None:
        """Where the step's queries are kept, for KV compression; None: nowhere."""
        return self.parts.get(kv_compression.NAME)

    @property
    def taps(self) -> Taps | None:
        """Set if a speculator reads layers' inputs."""
        return self.parts.get(speculation.NAME)

    @property
    def source(self) -> SourceContext | None:
        """Set for an encoder-decoder model."""
        return self.parts.get(encoder_decoder.NAME)

    @property
    def input_embeds(self) -> InputEmbedsContext | None:
        """Set for a step with tokens that rows stand for, or that turn by other positions."""
        return self.parts.get(input_embeds.NAME)

    def spans(self, spec: AttentionSpec) -> Sequence[Span]:
        """Return the step's tokens that see each other in both directions in such a layer."""
        return () if self.input_embeds is None else self.input_embeds.spans_of(spec)

    def rotation(self, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Return by which positions heads turn, [num_tokens], and the table that they index."""
        rope = None if self.input_embeds is None else self.input_embeds.rope
        if rope is None:
            return self.positions, rotary.cos_sin
        key = f"rotation {id(rotary)}"
        if key not in self.shared:
            self.shared[key] = rope.rotation(rotary)
        turned: tuple[torch.Tensor, torch.Tensor] = self.shared[key]
        return turned

    @property
    def incoming(self) -> torch.Tensor | None:
        """[num_tokens, incoming_size] What layers of the stage before have computed, which takes
        the place of embeddings and may be overwritten; None: this is the first stage."""
        return self.parts.get("pipeline")

    @classmethod
    def of(
        cls,
        backend: PagedBackend | None,
        layouts: Sequence[BatchLayout],
        positions: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        *,
        precompiling: bool = False,
        parts: Mapping[str, Any] | None = None,
    ) -> ForwardContext:
        """Create the context of a step, from one layout per cache group."""
        first, *more = (
            GroupContext(layout, None if backend is None else backend.build_metadata(layout))
            for layout in layouts
        )
        return cls(
            backend,
            first.metadata,
            first.layout,
            positions,
            token_type_ids,
            precompiling=precompiling,
            more_groups=tuple(more),
            parts=parts or {},
        )

    def with_incoming(self, states: torch.Tensor) -> ForwardContext:
        """Return the context with these states in place of embeddings."""
        return replace(self, parts={**self.parts, "pipeline": states})

    def of_group(self, number: int) -> GroupContext:
        """Return the data that the layers of a cache group read."""
        return self.more_groups[number - 1] if number else GroupContext(self.layout, self.metadata)
