"""Common parts of the 4- and 8-bit formats with one scale per group of columns.

All variants (packed along rows or columns, interleaved, with zeros, sorted by activation size) are
converted at load to the kernels' one layout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...core.errors import LoadError
from ...core.nn.quantized_weight import WORD_BITS, QuantizedWeight, pack_words
from ...core.parallel.sharding import FEATURES, Sharding


class Grouped(NamedTuple):
    """One shard, unpacked: W[n, k] = (values[n, k] - zeros[g, n]) * scales[g, n]."""

    values: torch.Tensor
    """[N, K] integers in [0, 2 ** bits)"""
    scales: torch.Tensor
    """[G, N]"""
    zeros: torch.Tensor | None
    """[G, N] integers; None: 2 ** (bits - 1)"""
    group_of_column: torch.Tensor | None = None
    """[K] group of each column; None: in order."""


def unpack_along(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unpack int32 words of neighbours along `dim`, the first in the lowest bits."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=packed.device)
    words = packed.movedim(dim, -1)
    numbers = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(-2).movedim(-1, dim)


def own_groups(groups: torch.Tensor | None, sharding: Sharding | None) -> torch.Tensor | None:
    """Return the groups of a rank's columns, renumbered from 0: [K]; unchanged where ranks shard
    rows.
    """
    if groups is None or sharding is None or FEATURES[sharding.dim] == "out":
        return groups
    return groups - groups.min()


def join(shards: list[Grouped], bits: int, group_size: int) -> QuantizedWeight:
    """Stack shards and repack. Raises LoadError if they cannot form one product."""
    size = shards[0].values.shape[1]
    order = _common_order(shards, group_size)
    words, scales, zeros = [], [], []
    half = 1 << (bits - 1)
    for shard in shards:
        values = shard.values if order is None else shard.values[:, order]
        words.append(pack_words(values, bits))
        scales.append(shard.scales)
        if shard.zeros is None:
            zeros.append(torch.full_like(shard.scales, half, dtype=torch.uint8))
        else:
            zeros.append(shard.zeros.to(torch.uint8))
    zero = torch.cat(zeros, dim=1)
    return QuantizedWeight(
        values=torch.cat(words),
        scale=torch.cat(scales, dim=1).contiguous(),
        # Equal zeros need no tensor.
        zero=None if bool((zero == half).all()) else zero.contiguous(),
        group_size=min(group_size, size),
        bits=bits,
        order=order,
    )


def _common_order(shards: list[Grouped], group_size: int) -> torch.Tensor | None:
    """[K] int64 that sorts columns by group; None if sorted."""
    orders = []
    for shard in shards:
        if shard.group_of_column is None:
            continue
        groups = shard.group_of_column.long()
        counts = torch.bincount(groups)
        if bool((counts[:-1] != group_size).any()) or int(counts[-1]) > group_size:
            raise LoadError(f"g_idx does not put {group_size} columns into each group")
        if bool((groups.diff() < 0).any()):
            orders.append(groups.argsort(stable=True))
    if not orders:
        return None
    if len(orders) < len(shards) or any(not torch.equal(orders[0], o) for o in orders[1:]):
        raise LoadError("layers that are computed as one have columns in different orders (g_idx)")
    return orders[0]
