"""The arithmetic of a layer outside attention, in plain torch: the reference, for any device.

Blocks call these through `BuildContext.operations`. A plugin that registers a subclass
(`register_operations`) replaces as many as it has better code for; the others stay as here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from .kv_cache.quantized_cache import QuantizedCache, write_blocks
from .packed import PackedWeight, dequantize
from .ragged import RaggedRows
from .routing import Routing, RoutingRule, choose_experts
from .state.operations import StateOperations


class Norm(NamedTuple):
    """An RMSNorm's parameters, for operations that apply it to their input."""

    weight: torch.Tensor
    """[size], of x's type or float32"""
    eps: float


class HeadLayout(NamedTuple):
    """Split of a projection's last dimension: queries, then keys, then values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class ClampedSwiGLU(NamedTuple):
    """(min(max(up, -limit), limit) + 1) * gate * sigmoid(alpha * gate), with gate at most limit.

    Source: GPT-OSS's model card (arXiv 2508.10925) and published code.
    """

    alpha: float
    limit: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """[any] both → the same shape"""
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


class DenseRows(NamedTuple):
    """A weight that only its layer can read."""

    out_features: int
    rows: Callable[[torch.Tensor], torch.Tensor]
    """Indices [num_rows] int64 → those rows, dequantised, [num_rows, in_features]"""


ExpertWeight: TypeAlias = torch.Tensor | PackedWeight | DenseRows
"""One linear layer of E experts, stacked: a weight of [E * out_features, in_features]."""


class DecodeTensors(NamedTuple):
    """A decode step's inputs, R rows. All on the device."""

    slots: torch.Tensor
    """[R] int64"""
    input_ids: torch.Tensor
    """[R] int64"""
    positions: torch.Tensor
    """[R] int64"""
    lengths: torch.Tensor
    """[R] int64: positions + 1"""
    slot_mapping: torch.Tensor
    """[R] int64"""
    seq_lens: torch.Tensor
    """[R] int32: tokens in the cache once the step has written its own"""
    block_table: torch.Tensor
    """[R, columns] int32"""


class StepTensors(NamedTuple):
    """Inputs of a step of ragged rows: R rows, T tokens. All on the device."""

    input_ids: torch.Tensor
    """[T] int64"""
    positions: torch.Tensor
    """[T] int64"""
    slot_mapping: torch.Tensor
    """[T] int64"""
    sample_slots: torch.Tensor
    """[R] int64"""
    lengths: torch.Tensor
    """[R] int64: tokens of the sequence once the step has computed its own"""
    last_tokens: torch.Tensor
    """[R] int64: index into T; 0 for a row without tokens at the front"""
    seq_lens: torch.Tensor
    """[R] int32: tokens in the cache once the step has written its own"""
    block_table: torch.Tensor
    """[R, columns] int32"""


class SlotTables(NamedTuple):
    """The slots' tables that sampling reads, on the device, at constant addresses."""

    settings: torch.Tensor
    """[slots, columns] int32 (core/worker/sampling/sampling_columns.py)"""
    counts: torch.Tensor
    """[slots, vocab_size] int16: times a token was generated; the sign bit: the prompt has it.
    Kept for slots with `Flag.PENALTIES`."""
    allowed: torch.Tensor
    """[slots, ceil(vocab_size / 32)] int32: token i may come next if bit i % 32 of word i // 32 is
    on. Read for slots with `Flag.ALLOWED`, kept for those with `Flag.BANS`."""
    history: torch.Tensor
    """[slots, positions] int32: tokens; the chosen one is written at its position."""


class CacheMoves(NamedTuple):
    """Which tokens of which caches stay in a compaction, and where they go: N requests, L layers, T
    tokens that stay in all requests together. All on the device, but `counts`."""

    slots: torch.Tensor
    """[N] int32"""
    starts: torch.Tensor
    """[N + 1] int32: request n has tokens starts[n] .. starts[n + 1] of `chosen`."""
    chosen: torch.Tensor
    """[L, T, num_kv_heads] int32: where each token is in its request's cache, ascending in each
    request and head."""
    block_table: torch.Tensor
    """[slots, columns] int32: the blocks of the caches as they are."""
    targets: torch.Tensor
    """[N, target columns] int32: the blocks that they go to, from the first place on. They may be
    the first ones of the same cache; no other request reads them."""
    counts: tuple[int, ...]
    """[N] Tokens that stay in each request."""


class SampleOutputs(NamedTuple):
    """Destination of a step's sampled tokens; may have more rows than the step."""

    chosen: torch.Tensor
    """[rows] int32; -1: no token can be chosen"""
    top_ids: torch.Tensor
    """[rows, 20] int32, most likely first, lower ids first among equals"""
    top_logprobs: torch.Tensor
    """[rows, 20] float32"""
    logprob: torch.Tensor
    """[rows] float32, of the chosen token"""
    rank: torch.Tensor
    """[rows] int32, of the chosen token: 1 + the number of more likely ones"""

    def first(self, num_rows: int) -> SampleOutputs:
        """Return views of the first `num_rows` rows."""
        return SampleOutputs(*(part[:num_rows] for part in self))


class GrammarBits(NamedTuple):
    """The allowed tokens of a step's constrained rows."""

    bits: torch.Tensor
    """[count, ceil(vocab_size / 32)] int32, as `SlotTables.allowed`"""
    places: torch.Tensor
    """[R] int64: index of each row's bits; -1: not constrained"""


class Precompiler(Protocol):
    """A period in which kernels are compiled and not launched."""

    def compiles(self) -> bool:
        """Whether any kernel requested so far has to be compiled."""


class Operations(StateOperations):
    """T = num_tokens. Weights are [out_features, in_features].

    Results are of the input's type. An argument is overwritten only if its method says so, and a
    row of a result does not depend on the other rows. Conformance tests for subclasses:
    `jackfield.plugins.conformance.operations`.
    """

    name: ClassVar[str] = "torch"
    features: ClassVar[frozenset[str]] = frozenset({
        "cached_heads.quantized", "write_cache.quantized",
        "decode_inputs.dropped", "step_inputs.dropped",
        "experts.activation", "experts.bias",
        "route.bias", "route.factor", "route.groups", "route.sigmoid",
    })  # fmt: skip
    """Options of methods that these operations support, as "method.option"; a model or an engine
    that needs another one is refused. A subclass that overrides such a method sets it; without
    that, it supports none of the method's options, so that an override never ignores one that is
    newer."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "features" not in vars(cls):
            cls.features = frozenset(
                name for name in cls.features if name.partition(".")[0] not in vars(cls)
            )

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return None if the operations run on this device, else the reason, in one clause."""
        return None

    @classmethod
    def initialize_device(cls, device: torch.device) -> None:
        """Do slow initialisation that needs no model: called at start, on any thread, before others
        use the device. A step that fails here is repeated when it is needed."""

    def precompile(self, device: torch.device) -> AbstractContextManager[Precompiler] | None:
        """Return a context in which this thread's kernel launches only request compilation, and
        whose exit waits for all compilations; None: these operations compile nothing.

        Tensors that kernels would have written have the right shape and undefined contents. Other
        kernels (torch's) run as usual, on such contents.
        """
        return None

    def num_loaded(self) -> int:
        """Return the number of kernels compiled or loaded in this process so far; a step that
        increases it was delayed by that."""
        return 0

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """[..., size] → x / rms(x), rounded to the weight's type, times the weight; of x's type."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        return (norm.weight * wide.to(norm.weight.dtype)).to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, norm: Norm, residual: torch.Tensor) -> torch.Tensor:
        """residual + norm(x): [T, size] → the same shape. `residual` may be overwritten."""
        return residual + self.rms_norm(x, norm)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """(x - mean) / deviation * weight + bias over the last dimension, [..., size]."""
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def bidirectional_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: RaggedRows,
        scale: float,
    ) -> torch.Tensor:
        """Attention in which each token sees all tokens of its row; nothing is cached.

        query, key, value: [T, num_heads, head_dim] → the same shape.
        """
        out = torch.empty_like(query)
        for group in rows.groups:
            shaped = [part[group.tokens].transpose(1, 2) for part in (query, key, value)]
            attended = F.scaled_dot_product_attention(
                shaped[0], shaped[1], shaped[2], attn_mask=group.visible, scale=scale
            )
            flat = attended.transpose(1, 2).reshape(-1, *query.shape[1:])
            out[group.source] = flat if group.visible is None else flat[group.place]
        return out

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """residual + norm(x) Wᵀ + bias: [T, in_features] → [T, out_features].

        `residual` may be overwritten: use the returned tensor.
        """
        if norm is not None:
            x = self.rms_norm(x, norm)
        out = F.linear(x, weight, bias)
        return out if residual is None else residual + out

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: Norm | None = None,
    ) -> torch.Tensor:
        """silu(gate) * up of one product, gate's rows first: [T, in_features] → [T, out / 2]."""
        return self.silu_mul(self.linear(x, weight, bias, norm=norm))

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 * size], gate then up → [T, size]"""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """As `silu_mul`, with gelu by its tanh approximation (arXiv 1606.08415)."""
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def packed_linear(
        self,
        x: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """`linear`, or with `gated` `gated_linear`, with a quantized weight.

        The reference dequantises the weight each time, and never rounds inputs.
        """
        dense = dequantize(weight, x.dtype)
        if gated:
            assert residual is None, "a gate has no residual"
            return self.gated_linear(x, dense, bias, norm=norm)
        return self.linear(x, dense, bias, norm=norm, residual=residual)

    def route(self, logits: torch.Tensor, rule: RoutingRule) -> Routing:
        """Choose each token's experts. logits: [T, num_experts]; of equal scores, the lower number
        is chosen."""
        return choose_experts(logits, rule)

    def experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        gate_up: ExpertWeight,
        down: ExpertWeight,
        *,
        residual: torch.Tensor,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        activation: ClampedSwiGLU | None = None,
    ) -> torch.Tensor:
        """residual + Σ weight * down_e(silu(gate_e(x)) * up_e(x)) over each token's experts e.

        x, residual: [T, hidden_size]; gate_up: E experts' [2 * inner, hidden_size], gate first;
        down: E experts' [hidden_size, inner] → [T, hidden_size]. `residual` may be overwritten.
        Biases: [E * 2 * inner] and [E * hidden_size], added to the products of each expert's
        layers; `activation`: in place of silu(gate) * up. Only models that have these three pass
        them (`features`).

        The reference computes one expert at a time. On a device that runs asynchronously to the
        host, each expert computes all tokens: the launches then do not depend on the routing, and a
        graph can contain them.
        """
        num_experts = _num_rows(down) // x.shape[1]
        rows_up, rows_down = _num_rows(gate_up) // num_experts, x.shape[1]
        out = torch.zeros_like(x)
        for expert in range(num_experts):
            chosen = routing.experts == expert
            tokens: slice | torch.Tensor = slice(None)
            if x.device.type == "cpu":
                tokens = chosen.any(dim=1).nonzero()[:, 0]
                if not len(tokens):
                    continue
            first = _dense_rows(gate_up, expert * rows_up, rows_up, x)
            second = _dense_rows(down, expert * rows_down, rows_down, x)
            biases = [
                None if bias is None else bias[expert * rows : (expert + 1) * rows]
                for bias, rows in ((gate_up_bias, rows_up), (down_bias, rows_down))
            ]
            if activation is None:
                inner = self.gated_linear(x[tokens], first, biases[0])
            else:
                inner = activation(*self.linear(x[tokens], first, biases[0]).chunk(2, dim=-1))
            made = self.linear(inner, second, biases[1])
            weight = (routing.weights * chosen).sum(dim=1, keepdim=True).to(x.dtype)
            out[tokens] += made * weight[tokens]
        return residual + out

    def heads(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split a projection into heads, norm and rotate them.

        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], may be overwritten; positions: [T];
        cos_sin: [max_positions, rotary_dim] float32, cosines then sines, None without rotation.
        → query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim]
        """
        query, key, value = split_heads(qkv, layout)
        if query_norm is not None:
            query = self.rms_norm(query, query_norm)
        if key_norm is not None:
            key = self.rms_norm(key, key_norm)
        if cos_sin is not None:
            turn = cos_sin[positions][:, None].to(qkv.dtype)
            query, key = rotate(query, turn), rotate(key, turn)
        return query, key, value

    def cached_heads(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
        kv_cache: Any,
        slot_mapping: torch.Tensor,
        cache_scales: tuple[float, float] = (1.0, 1.0),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Do as `heads`, and then as `write_cache`."""
        query, key, value = self.heads(qkv, layout, positions, cos_sin, query_norm, key_norm)
        self.write_cache(key, value, kv_cache, slot_mapping, cache_scales)
        return query, key, value

    def write_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: Any,
        slot_mapping: torch.Tensor,
        cache_scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Write keys and values, [T, num_kv_heads, head_dim] each, to the cache.

        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim]; slot_mapping: [T] int64. An
        fp8 cache gets keys and values divided by `cache_scales`, and clamped to the type's range; a
        quantized one computes scales of its own. Only operations with the feature `quantized` get
        one.
        """
        if isinstance(kv_cache, QuantizedCache):
            return write_blocks(key, value, kv_cache, slot_mapping)
        for cache, part, scale in zip(kv_cache, (key, value), cache_scales, strict=True):
            if cache.dtype.itemsize == 1:
                largest = torch.finfo(cache.dtype).max
                part = (part.float() / scale).clamp_(-largest, largest).to(cache.dtype)
                # As bytes: torch has no indexed copy for fp8.
                cache, part = cache.view(torch.uint8), part.view(torch.uint8)
            cache.flatten(0, 1).index_copy_(0, slot_mapping, part.to(cache.dtype))

    def decode_inputs(
        self,
        packed: torch.Tensor,
        lengths: torch.Tensor,
        token_history: torch.Tensor,
        block_table: torch.Tensor,
        row_tables: torch.Tensor,
        block_size: int,
        dropped: torch.Tensor | None = None,
    ) -> DecodeTensors:
        """Compute the inputs of a decode step of R rows, each at its slot's length; write new
        blocks to its table and to the row's, and add 1 to the lengths.

        packed: [2, R] int32: each row's slot (-1 - slot: `row_tables` has its table but for the new
        block), and the block that it gets for its token (0: it has one); lengths: [slots] int32;
        token_history: [slots, positions] int32; block_table: [slots, columns] int32; row_tables:
        [R, columns] int32, contiguous, which the result has; dropped: [slots] int32, how many
        tokens fewer a slot's cache has than its length says (given with KV compression; None:
        none). Padding rows share the last slot, whose length stays 0.
        """
        words, new_blocks = packed[0].long(), packed[1]
        kept = words < 0
        slots = torch.where(kept, -1 - words, words)
        positions = lengths[slots].long()
        places = positions if dropped is None else positions - dropped[slots]
        own = (slots, places // block_size)
        blocks = torch.where(new_blocks > 0, new_blocks, block_table[own])
        block_table.index_put_(own, blocks)
        row_tables.copy_(torch.where(kept[:, None], row_tables, block_table[slots]))
        row_tables.scatter_(1, own[1][:, None], blocks[:, None])
        lengths.index_add_(0, slots, (slots < lengths.shape[0] - 1).int())
        return DecodeTensors(
            slots=slots,
            input_ids=token_history[slots, positions].long(),
            positions=positions,
            lengths=positions + 1,
            slot_mapping=blocks.long() * block_size + places % block_size,
            seq_lens=places.int() + 1,
            block_table=row_tables,
        )

    def step_inputs(
        self,
        query_start: torch.Tensor,
        slots: torch.Tensor,
        sample_slots: torch.Tensor,
        num_tokens: int,
        lengths: torch.Tensor,
        token_history: torch.Tensor,
        block_table: torch.Tensor,
        block_size: int,
        dropped: torch.Tensor | None = None,
    ) -> StepTensors:
        """Compute the inputs of a step of R ragged rows, each from its slot's length on.

        query_start: [R + 1] int32, row r's tokens are query_start[r] .. query_start[r + 1], and
        rows without tokens come last; slots: [R] int32, each row's slot; sample_slots: [R] int32,
        returned as int64; num_tokens: T, the last of query_start; lengths: [slots] int32;
        token_history: [slots, positions] int32; block_table: [slots, columns] int32; dropped:
        [slots] int32, as for `decode_inputs`.
        """
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=slots.device)
        rows = torch.searchsorted(query_start[1:].contiguous(), tokens, right=True)
        slot_of_row = slots.long()
        slot_of_token = slot_of_row[rows]
        first_positions = lengths[slot_of_row]
        positions = (first_positions[rows] + tokens - query_start[rows]).long()
        ends = query_start[1:]
        all_lengths = first_positions + ends - query_start[:-1]
        places, seq_lens = positions, all_lengths
        if dropped is not None:
            places = positions - dropped[slot_of_token]
            seq_lens = all_lengths - dropped[slot_of_row]
        blocks = block_table[slot_of_token, places // block_size].long()
        return StepTensors(
            input_ids=token_history[slot_of_token, positions].long(),
            positions=positions,
            slot_mapping=blocks * block_size + places % block_size,
            sample_slots=sample_slots.long(),
            lengths=all_lengths.long(),
            last_tokens=(ends - 1).clamp(min=0).long(),
            seq_lens=seq_lens,
            block_table=block_table[slot_of_row],
        )

    def advance(
        self, lengths: torch.Tensor, slots: torch.Tensor, query_start: torch.Tensor
    ) -> None:
        """Add the tokens of each of R rows to its slot's length, but nothing to the last slot's,
        which padding rows share.

        All int32: lengths [slots], slots [R], query_start [R + 1], as for `step_inputs`.
        """
        counts = query_start[1:] - query_start[:-1]
        lengths.index_add_(0, slots, counts * (slots < lengths.shape[0] - 1))

    def slot_mappings(
        self,
        block_table: torch.Tensor,
        columns: int,
        query_start: torch.Tensor,
        positions: torch.Tensor,
        block_size: int,
    ) -> torch.Tensor:
        """Compute the slot mappings of a step's tokens in the tables after the first of G per row.

        block_table: [R, G * columns] int32, contiguous, a row's tables one after another;
        query_start: [R + 1] int32, rows without tokens last; positions: [T] int64, of each token in
        its row → [G - 1, T] int64: block * block_size + offset
        """
        tokens = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
        rows = torch.searchsorted(query_start[1:].contiguous(), tokens, right=True)
        tables = block_table.view(block_table.shape[0], -1, columns)[:, 1:].transpose(0, 1)
        blocks = tables[:, rows, positions // block_size].long()
        return blocks * block_size + positions % block_size

    def best_tokens(self, scores: torch.Tensor, out: torch.Tensor) -> None:
        """Write the tokens with the highest scores of each layer and head, ascending; among equal
        scores, the earlier ones.

        scores: [L, num_kv_heads, num_tokens] float32, contiguous, none NaN → out: [L, num_kept,
        num_kv_heads] int32, contiguous within a layer
        """
        order = scores.argsort(dim=2, descending=True, stable=True)[..., : out.shape[1]]
        out.copy_(order.sort(dim=2).values.transpose(1, 2))

    def compact_caches(self, caches: Sequence[torch.Tensor], moves: CacheMoves) -> None:
        """Move the tokens that stay in each layer's cache.

        caches: [L] of [count, num_blocks, block_size, num_kv_heads, width], which may be views with
        any strides: keys and values, or a part of a quantized cache
        """
        for layer, cache in enumerate(caches):
            size, num_kv_heads = cache.shape[2:4]
            heads = torch.arange(num_kv_heads, device=cache.device)
            end = 0
            for request, count in enumerate(moves.counts):
                begin, end = end, end + count
                index = moves.chosen[layer, begin:end].long()
                table = moves.block_table.index_select(0, moves.slots[request : request + 1])[0]
                kept = cache[:, table[index // size].long(), index % size, heads]
                order = torch.arange(count, device=cache.device)
                cache[:, moves.targets[request][order // size].long(), order % size] = kept

    def scatter(self, storage: torch.Tensor, writes: torch.Tensor, count: torch.Tensor) -> None:
        """Set storage[writes[i, 0]] = writes[i, 1] for i < count; `storage`'s last may change.

        All int32: storage [any], writes [most, 2], contiguous, count [1]. Indices are different.
        """
        index = torch.arange(writes.shape[0], device=writes.device)
        places = torch.where(index < count, writes[:, 0].long(), storage.shape[0] - 1)
        storage.index_copy_(0, places, writes[:, 1])

    samples: ClassVar[bool] = False
    """Whether `sample` and `edit_logits` are implemented; otherwise torch samples."""

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        tables: SlotTables,
        out: SampleOutputs,
        *,
        plain: bool,
        grammar: GrammarBits | None = None,
        skip: int = 0,
    ) -> None:
        """Choose a token for each row, as `Sampler` (core/worker/sampling/sampler.py) specifies,
        and update its history and the slot's tables. The launches are the same for any rows, so
        that a graph can contain them.

        logits: [R, vocab_size], not changed; slots, lengths: [R] int64; plain: no row needs more
        than a temperature; skip: flags (`Flag` in sampling_columns.py, same folder) that no row has
        in this step. Rows with `Flag.FORCED`: the token `lengths` is scored.
        """
        raise NotImplementedError(f"operations {self.name!r} have no sampling (`samples`)")

    def sample_parts(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        tables: SlotTables,
        first: int,
    ) -> torch.Tensor:
        """The first half of a plain `sample`, for the tokens from `first` on: the best scores of
        parts of them.

        logits: [R, tokens], not changed; slots, lengths: [R] int64 → [R, 2, parts] int32: the bits
        of each part's best score in float32, +inf for NaN, and its token. Feature:
        "sample_parts.tokens".
        """
        raise NotImplementedError(f"operations {self.name!r} have no sampling (`samples`)")

    def sample_best(
        self,
        best: torch.Tensor,
        token: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        tables: SlotTables,
        out: SampleOutputs,
    ) -> None:
        """The second half: choose the token with the best score, the lowest among equals, as
        `sample` does. best: [R, parts] float32; token: [R, parts] int32, both contiguous."""
        raise NotImplementedError(f"operations {self.name!r} have no sampling (`samples`)")

    def edit_logits(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        tables: SlotTables,
        out: torch.Tensor,
        *,
        edits: int,
        scale: bool,
        grammar: GrammarBits | None = None,
    ) -> None:
        """Apply the part of `sample` that precedes a plugin's logits processor.

        logits, out: [R, vocab_size], out float32, may be the same; edits: flags of the edits to
        apply; scale: divide by the temperature, after them.
        """
        raise NotImplementedError(f"operations {self.name!r} have no sampling (`samples`)")

    def mask_tokens(
        self, logits: torch.Tensor, bits: torch.Tensor, rows: torch.Tensor | None
    ) -> None:
        """Set logits to -inf, in place, where a token's bit is off.

        logits: [R, vocab_size], any float dtype; bits: [count, ceil(vocab_size / 32)] int32, token
        i at bit i % 32 of word i // 32; rows: [count] int64, all different; None: row by row.
        """
        shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
        off = (bits.unsqueeze(-1) >> shifts).bitwise_and_(1).logical_not().flatten(1)
        off = off[:, : logits.shape[1]]
        if rows is None:
            logits.masked_fill_(off, float("-inf"))
        else:
            logits[rows] = logits[rows].masked_fill(off, float("-inf"))


def _num_rows(weight: ExpertWeight) -> int:
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) else weight.out_features


def _dense_rows(weight: ExpertWeight, start: int, count: int, x: torch.Tensor) -> torch.Tensor:
    """Return rows `start` .. `start + count` of a weight, dense, for products with inputs `x`."""
    if isinstance(weight, torch.Tensor):
        return weight[start : start + count]
    indices = torch.arange(start, start + count, device=x.device)
    if isinstance(weight, DenseRows):
        return weight.rows(indices)
    return dequantize(weight.rows(indices), x.dtype)


def split_heads(
    qkv: torch.Tensor, layout: HeadLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of a projection: query, key, value, each [T, heads, head_dim]."""
    heads = qkv.view(qkv.shape[0], -1, layout.head_dim)
    query, key, value = heads.split(
        [layout.num_heads, layout.num_kv_heads, layout.num_kv_heads], dim=1
    )
    return query, key, value


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first rotary_dim channels, half against half (NeoX style).

    x: [T, heads, head_dim]; cos_sin: [T, 1, rotary_dim]. Source: RoFormer (arXiv 2104.09864).
    """
    cos, sin = cos_sin.chunk(2, dim=-1)
    rotary_dim = cos_sin.shape[-1]
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    if rotary_dim < x.shape[-1]:
        rotated.append(x[..., rotary_dim:])
    return torch.cat(rotated, dim=-1)
