"""Paged batches with known content, and dense attention over the same rows, for the kits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...core.nn.context import BatchLayout
from ...core.protocols.attention import AttentionSpec

Sizes = Sequence[tuple[int, int]]
"""(total tokens, queries) of each row; the queries are its last tokens."""


@dataclass
class Row:
    """A request: all its keys and values so far, and the queries of this step (the last ones)."""

    query: torch.Tensor
    """[queries, num_heads, head_dim]"""
    key: torch.Tensor
    """[tokens, num_kv_heads, head_dim]"""
    value: torch.Tensor
    """[tokens, num_kv_heads, head_dim]"""


@dataclass
class Batch:
    """Rows, their places, and a cache in which everything else is NaN."""

    rows: list[Row]
    layout: BatchLayout
    cache: torch.Tensor
    """[2, num_blocks, block_size, num_kv_heads, head_dim], without this step's tokens."""
    positions: torch.Tensor
    """[num_tokens] int64"""

    def joined(self, name: str) -> torch.Tensor:
        """Return the step's queries, keys or values, [num_tokens, heads, head_dim]."""
        return torch.cat([getattr(row, name)[-len(row.query) :] for row in self.rows])


def make_batch(
    sizes: Sizes,
    spec: AttentionSpec,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    table_width: int | None = None,
    released: bool = False,
) -> Batch:
    """Return random rows in shuffled blocks; NaN in block 0 and wherever no earlier token lies.

    released: blocks before the window or chunks were released; the table has block 0 in their
    place.
    """
    random = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length, _ in sizes]
    num_blocks = sum(counts) + 5
    free = (torch.randperm(num_blocks - 1, generator=random) + 1).tolist()
    shape = (2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
    cache = torch.full(shape, float("nan"), dtype=dtype)
    flat = cache.flatten(1, 2)
    table = torch.zeros(len(sizes), table_width or max(counts) + 2, dtype=torch.int32)
    rows: list[Row] = []
    slots: list[int] = []
    for index, (length, queries) in enumerate(sizes):
        blocks = [free.pop() for _ in range(counts[index])]
        table[index, : len(blocks)] = torch.tensor(blocks)
        own = [blocks[p // block_size] * block_size + p % block_size for p in range(length)]
        slots += own[length - queries :]
        kv_shape = (length, spec.num_kv_heads, spec.head_dim)
        key = torch.randn(kv_shape, generator=random).to(dtype)
        value = torch.randn(kv_shape, generator=random).to(dtype)
        query = torch.randn(queries, spec.num_heads, spec.head_dim, generator=random).to(dtype)
        flat[0, own[: length - queries]] = key[: length - queries]
        flat[1, own[: length - queries]] = value[: length - queries]
        if released and spec.reach is not None:
            behind = max(spec.reach.first_visible(length - queries), 0) // block_size
            table[index, :behind] = 0
            cache[:, blocks[:behind]] = float("nan")
        rows.append(Row(query.to(device), key.to(device), value.to(device)))
    positions = torch.cat([torch.arange(length - queries, length) for length, queries in sizes])
    slot_mapping = torch.tensor(slots, dtype=torch.int64)
    layout = make_layout(sizes, table, slot_mapping, device)
    return Batch(rows, layout, cache.to(device), positions.to(device))


def make_layout(
    sizes: Sizes,
    table: torch.Tensor,
    slot_mapping: torch.Tensor,
    device: torch.device,
    slots: Sequence[int] | None = None,
) -> BatchLayout:
    """Return the layout of rows whose blocks and places are given. slots: of rows, for layers with
    states."""
    starts = np.cumsum([0, *(queries for _, queries in sizes)]).astype(np.int32)
    lengths = np.array([length for length, _ in sizes], dtype=np.int32)
    return BatchLayout.of(
        query_start=torch.from_numpy(starts.copy()).to(device),
        seq_lens=torch.from_numpy(lengths.copy()).to(device),
        block_table=table.to(device),
        slot_mapping=slot_mapping.to(device),
        query_start_cpu=starts,
        seq_lens_cpu=lengths,
        slots=None if slots is None else torch.tensor(slots, dtype=torch.int32, device=device),
    )


def dense_attention(
    spec: AttentionSpec,
    rows: Sequence[Row],
    sinks: torch.Tensor | None = None,
    distance_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute each row separately in float32, with explicit mask and bias.

    sinks: [num_heads]; distance_bias: [num_heads, num_distances], the last one for all from it on
    → [num_tokens, num_heads, head_dim] float32
    """
    outputs = []
    group = spec.num_heads // spec.num_kv_heads
    for row in rows:
        queries, keys = len(row.query), len(row.key)
        own = torch.arange(keys - queries, keys, device=row.query.device)
        distance = own[:, None] - torch.arange(keys, device=row.query.device)
        seen = distance >= 0
        if spec.sliding_window is not None:
            seen &= distance < spec.sliding_window
        if spec.attention_chunk_size is not None:
            chunk = torch.arange(keys, device=row.query.device) // spec.attention_chunk_size
            seen &= chunk[keys - queries :, None] - chunk <= spec.chunk_lookback
        heads = []
        for head in range(spec.num_heads):
            key, value = row.key[:, head // group].float(), row.value[:, head // group].float()
            scores = row.query[:, head].float() @ key.T * spec.scale
            if spec.soft_cap is not None:
                scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
            if spec.alibi_slopes is not None:
                scores = scores - spec.alibi_slopes[head] * distance
            if distance_bias is not None:
                scores = (
                    scores + distance_bias[head][distance.clamp(0, len(distance_bias[head]) - 1)]
                )
            weights = scores.double().masked_fill(~seen, float("-inf")).exp()
            total = weights.sum(-1, keepdim=True)
            if sinks is not None:
                total = total + sinks[head].double().exp()
            heads.append((weights / total).float() @ value)
        outputs.append(torch.stack(heads, dim=1))
    return torch.cat(outputs)
