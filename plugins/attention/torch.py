"""Attention in plain torch: the reference backend, for any device.

Rows that compute one token (decode) go together through one padded gather and one batched
product; other rows go one by one. No loop over tokens, and no device value is read on the host:
sizes come from the layout's numpy twins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from ...core.cache.formats import QUANTIZED_FORMATS
from ...core.cache.reach import Reach
from ...core.nn.context import BatchLayout, CacheLevels
from ...core.nn.kv_cache.quantized_cache import KVCache, read_keys, read_values
from ...core.nn.sdpa import sdpa
from ...core.protocols.attention import AttentionBackend, AttentionSpec, BackendSetup
from .torch_levels import level_tokens, sees_all

GATHER_ELEMENTS = 1 << 24
"""Most cached keys (elements) gathered at once: bounds a decode step's memory."""
SCORE_ELEMENTS = 1 << 25
"""Most scores of one prefill product (elements): bounds a long prefill's memory."""
PADDING_ALLOWED = 4096
"""Padded cache positions that a gather may waste before it is split."""


@dataclass(frozen=True)
class DecodeChunk:
    """Rows [first_row, end_row), each with one query, gathered together."""

    first_row: int
    end_row: int
    first_block: int
    """Blocks [first_block, end_block) of each row's table cover all visible positions."""
    end_block: int
    num_shared: int
    """Leading positions that every row sees."""
    visible: torch.Tensor
    """[rows, (end_block - first_block) * block_size] bool"""


@dataclass(frozen=True)
class TorchMetadata:
    """The layout as Python numbers, and its decode chunks, created by a layer's first use."""

    layout: BatchLayout
    starts: list[int]
    seq_lens: list[int]
    chunks: dict[tuple[Reach | None, int], list[DecodeChunk]] = field(default_factory=dict)
    """Keyed by reach and by positions gathered at once."""


class Extras(NamedTuple):
    """Additions to plain attention, by kv head and query head of its group."""

    slopes: torch.Tensor | None
    """[num_kv_heads, group] float32"""
    sinks: torch.Tensor | None
    """[num_kv_heads, group] float32"""
    biases: torch.Tensor | None
    """[num_kv_heads, group, distances] float32"""

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        sinks: torch.Tensor | None,
        distance_bias: torch.Tensor | None,
        device: torch.device,
    ) -> Extras:
        slopes = None
        if spec.alibi_slopes is not None:
            slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=device)
            slopes = slopes.view(spec.num_kv_heads, -1)
        biases = None
        if distance_bias is not None:
            biases = distance_bias.float().view(spec.num_kv_heads, -1, distance_bias.shape[1])
        sinks = None if sinks is None else sinks.float().view(spec.num_kv_heads, -1)
        return cls(slopes, sinks, biases)

    def by_distance(self, distance: torch.Tensor) -> torch.Tensor | None:
        """Return the addition to logits, None for none. distance: [..., keys] int, from key to
        query → [num_kv_heads, group, ..., keys].
        """
        bias = None
        if self.slopes is not None:
            bias = self.slopes.view(*self.slopes.shape, *(1 for _ in distance.shape)) * -distance
        if self.biases is not None:
            learned = self.biases[:, :, distance.clamp(0, self.biases.shape[-1] - 1).long()]
            bias = learned if bias is None else bias + learned
        return bias

    def none(self, spec: AttentionSpec) -> bool:
        """Whether the layer is a plain softmax of scaled products."""
        extras = (spec.soft_cap, self.slopes, self.sinks, self.biases)
        return all(extra is None for extra in extras)


class TorchAttention(AttentionBackend):
    """`AttentionBackend` on torch operations alone. Softmax and sums are in float32."""

    name: ClassVar[str] = "torch"
    fp8_cache: ClassVar[bool] = True
    cache_formats: ClassVar[frozenset[str]] = frozenset(QUANTIZED_FORMATS)
    cache_groups: ClassVar[bool] = True
    compacted_cache: ClassVar[bool] = True
    leveled_cache: ClassVar[bool] = True
    bounded_lengths: ClassVar[bool] = True
    features: ClassVar[frozenset[str]] = frozenset(
        {
            "sliding_window", "attention_chunk_size", "chunk_lookback", "soft_cap", "alibi_slopes",
            "sinks", "distance_bias", "key_scale", "value_scale",
        }
    )  # fmt: skip

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        """None when it can serve this layer here, else the reason."""
        if spec.num_heads % spec.num_kv_heads:
            return (
                f"num_heads ({spec.num_heads}) is no multiple of num_kv_heads ({spec.num_kv_heads})"
            )
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"dtype {dtype} is not float32, float16 or bfloat16"
        return None

    def __init__(self, setup: BackendSetup) -> None:
        self.device = setup.device
        self.block_size = setup.block_size
        self.max_model_len = setup.max_model_len

    def build_metadata(self, layout: BatchLayout) -> TorchMetadata:
        """Build the layout as Python numbers, once per step. Waits for the device if only that
        knows the lengths."""
        seq_lens = layout.seq_lens if layout.bounded else np.asarray(layout.seq_lens_cpu)
        return TorchMetadata(
            layout=layout,
            starts=np.asarray(layout.query_start_cpu)[: layout.num_rows + 1].tolist(),
            seq_lens=seq_lens[: layout.num_rows].tolist(),
        )

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: KVCache,
        metadata: TorchMetadata,
        *,
        sinks: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query: [num_tokens, num_heads, head_dim] → the same shape; see the protocol."""
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        extras = Extras.of(spec, sinks, distance_bias, query.device)
        levels, slots = metadata.layout.levels, metadata.layout.slots
        if levels is not None and sees_all(spec, self.max_model_len):
            assert slots is not None and isinstance(kv_cache, torch.Tensor), "as levels need them"
            counts = levels.tokens[slots[: metadata.layout.num_rows].long()].tolist()
            for row, own in enumerate(counts):
                self._attend_levels(spec, query, kv_cache, metadata, row, levels, own, extras, out)
            return out
        for chunk in self._decode_chunks(spec, metadata):
            self._decode(spec, query, kv_cache, metadata, chunk, extras, out)
        starts = metadata.starts
        for row in range(metadata.layout.num_rows):
            if starts[row + 1] - starts[row] > 1:
                self._prefill(spec, query, kv_cache, metadata, row, extras, out)
        return out

    def _attend_levels(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TorchMetadata,
        row: int,
        levels: CacheLevels,
        counts: list[int],
        extras: Extras,
        out: torch.Tensor,
    ) -> None:
        """Attend for one row: its queries see all tokens of levels, and those after them up to
        themselves. counts: tokens of each level."""
        first, end = metadata.starts[row], metadata.starts[row + 1]
        seq_len = metadata.seq_lens[row]
        if first == end or not seq_len:
            return
        table = metadata.layout.block_table[row]
        (keys, values), column = level_tokens(
            kv_cache.unbind(), levels, counts, table, query.dtype
        )  # fmt: skip
        origin = column * self.block_size
        blocks = table[column : -(-seq_len // self.block_size)]
        newest = gather(spec, kv_cache, blocks, query.dtype)
        for found, part in zip((keys, values), newest, strict=True):
            found.append(part.flatten(0, 1)[: seq_len - origin])
        older = sum(counts)
        places = torch.arange(older + seq_len - origin, device=query.device)
        own = torch.arange(end - first, device=query.device) + older + seq_len - origin
        mask = places <= (own - (end - first))[:, None]
        group = spec.num_heads // spec.num_kv_heads
        # [kv heads, group, tokens, head_dim]
        key, value = (
            torch.cat(part).transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
            for part in (keys, values)
        )
        queries = query[first:end].view(end - first, -1, group, spec.head_dim).permute(1, 2, 0, 3)
        sinks = None if extras.sinks is None else extras.sinks[:, :, None]
        attended = attend(spec, queries, key, value, mask, bias=None, sinks=sinks)
        out[first:end] = attended.permute(2, 0, 1, 3).flatten(1, 2)

    def _decode_chunks(self, spec: AttentionSpec, metadata: TorchMetadata) -> list[DecodeChunk]:
        """Split the one-token rows into runs where a gather would be too large or mostly
        padding."""
        budget = max(GATHER_ELEMENTS // (spec.num_kv_heads * spec.head_dim), self.block_size)
        reach = spec.reach
        cached = metadata.chunks.get((reach, budget))
        if cached is not None:
            return cached
        chunks: list[DecodeChunk] = []
        first = useful = longest = 0
        end = -1
        for row, seq_len in enumerate(metadata.seq_lens):
            if metadata.starts[row + 1] - metadata.starts[row] != 1:
                continue
            seen = seq_len if reach is None else min(seq_len, reach.most_tokens)
            padded = (row + 1 - first) * max(longest, seen)
            wasteful = padded > 2 * (useful + seen) + PADDING_ALLOWED
            if row != end or padded > budget or wasteful:
                if end > first:
                    chunks.append(self._decode_chunk(spec, metadata, first, end))
                first, useful, longest = row, 0, 0
            useful, longest, end = useful + seen, max(longest, seen), row + 1
        if end > first:
            chunks.append(self._decode_chunk(spec, metadata, first, end))
        metadata.chunks[reach, budget] = chunks
        return chunks

    def _decode_chunk(
        self, spec: AttentionSpec, metadata: TorchMetadata, first: int, end: int
    ) -> DecodeChunk:
        lengths = metadata.seq_lens[first:end]
        reach = spec.reach
        first_block = 0
        if reach is not None:
            first_block = max(reach.first_visible(min(lengths) - 1), 0) // self.block_size
        end_block = max(-(-max(lengths) // self.block_size), first_block + 1)
        seq_lens = metadata.layout.seq_lens[first:end, None]
        positions = torch.arange(
            first_block * self.block_size,
            end_block * self.block_size,
            dtype=seq_lens.dtype,
            device=seq_lens.device,
        )
        visible = positions < seq_lens
        if reach is not None:
            visible &= positions >= reach.first_visible(seq_lens - 1)
        num_shared = min(lengths) if reach is None else 0
        return DecodeChunk(first, end, first_block, end_block, num_shared, visible)

    def _decode(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: TorchMetadata,
        chunk: DecodeChunk,
        extras: Extras,
        out: torch.Tensor,
    ) -> None:
        rows = chunk.end_row - chunk.first_row
        blocks = metadata.layout.block_table[
            chunk.first_row : chunk.end_row, chunk.first_block : chunk.end_block
        ].reshape(-1)
        shape = (rows, -1, spec.num_kv_heads, spec.head_dim)
        keys, values = (part.view(shape) for part in gather(spec, kv_cache, blocks, query.dtype))
        # Values past a row's end are undefined, maybe NaN: a zero weight does not remove them.
        hidden = ~chunk.visible[:, chunk.num_shared :, None, None]
        keys[:, chunk.num_shared :].masked_fill_(hidden, 0.0)
        values[:, chunk.num_shared :].masked_fill_(hidden, 0.0)
        first_token = metadata.starts[chunk.first_row]
        tokens = slice(first_token, first_token + rows)
        # All query heads of a kv head see the same keys: they are rows of one product.
        grouped = query[tokens].reshape(rows, spec.num_kv_heads, -1, spec.head_dim)
        mask = chunk.visible[:, None, None, :].expand(-1, 1, grouped.shape[2], -1)
        bias = None
        if extras.slopes is not None or extras.biases is not None:
            positions = torch.arange(
                chunk.first_block * self.block_size,
                chunk.end_block * self.block_size,
                device=query.device,
            )
            own = metadata.layout.seq_lens[chunk.first_row : chunk.end_row, None] - 1
            bias = extras.by_distance(own - positions)
            bias = None if bias is None else bias.permute(2, 0, 1, 3)
        attended = attend(
            spec,
            grouped,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            mask,
            bias=bias,
            sinks=extras.sinks,
        )
        out[tokens] = attended.reshape(rows, spec.num_heads, spec.head_dim)

    def _prefill(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: TorchMetadata,
        row: int,
        extras: Extras,
        out: torch.Tensor,
    ) -> None:
        """Attend for one row: its queries are the last positions of its sequence, computed in
        pieces."""
        first, end = metadata.starts[row], metadata.starts[row + 1]
        seq_len = metadata.seq_lens[row]
        context = seq_len - (end - first)
        reach = spec.reach
        first_block = 0
        if reach is not None:
            first_block = max(reach.first_visible(context), 0) // self.block_size
        origin = first_block * self.block_size
        blocks = metadata.layout.block_table[row, first_block : -(-seq_len // self.block_size)]
        gathered = gather(spec, kv_cache, blocks, query.dtype)
        keys, values = (part.flatten(0, 1)[: seq_len - origin] for part in gathered)
        group = spec.num_heads // spec.num_kv_heads
        # [kv heads, group, keys, head_dim], the group without a copy.
        keys = keys.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        values = values.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        queries = query[first:end].view(end - first, -1, group, spec.head_dim).permute(1, 2, 0, 3)
        sees_all = reach is None or reach.most_tokens >= seq_len
        if context == 0 and sees_all and extras.none(spec):
            attended = sdpa(queries, keys, values, is_causal=True, scale=spec.scale)
            out[first:end] = attended.permute(2, 0, 1, 3).flatten(1, 2)
            return
        step = max(SCORE_ELEMENTS // (spec.num_heads * seq_len), 1)
        positions = torch.arange(origin, seq_len, device=query.device)
        for begin in range(0, end - first, step):
            stop = min(begin + step, end - first)
            # No query of this piece sees keys after its last query.
            num_keys = context + stop - origin
            own = positions[context + begin - origin : num_keys, None]
            distance = own - positions[:num_keys]
            mask = distance >= 0
            if reach is not None:
                mask &= positions[:num_keys] >= reach.first_visible(own)
            attended = attend(
                spec,
                queries[:, :, begin:stop],
                keys[:, :, :num_keys],
                values[:, :, :num_keys],
                mask,
                bias=extras.by_distance(distance),
                sinks=None if extras.sinks is None else extras.sinks[:, :, None],
            )
            out[first + begin : first + stop] = attended.permute(2, 0, 1, 3).flatten(1, 2)


def gather(
    spec: AttentionSpec, kv_cache: KVCache, blocks: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of these blocks, each [blocks, block_size, num_kv_heads, head_dim]."""
    keys = read_keys(kv_cache, blocks, dtype, spec.key_scale)
    return keys, read_values(kv_cache, blocks, dtype, spec.value_scale)


def attend(
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query: [batch, heads, queries, head_dim]; mask: true where seen; bias: added to the logits;
    sinks: one more logit for each query → query's shape. All broadcast against the logits.
    """
    if spec.soft_cap is None and bias is None and sinks is None:
        return sdpa(query, key, value, mask=mask, scale=spec.scale)
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks[..., None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[-2]]
    return torch.matmul(weights, value.float()).to(query.dtype)
