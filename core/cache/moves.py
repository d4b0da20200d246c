"""Which tokens of which caches stay in a compaction, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class CacheMoves(NamedTuple):
    """N requests, L layers, T tokens that stay in all requests together. All on the device, but
    `counts`."""

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


def move_tokens(caches: Sequence[torch.Tensor], moves: CacheMoves) -> None:
    """Move keys and values: the reference, for any device. caches: [L] as in `compact_caches`."""
    for layer, cache in enumerate(caches):
        size, num_kv_heads = cache.shape[2:4]
        places = cache.flatten(1, 2)
        heads = torch.arange(num_kv_heads, device=cache.device)
        end = 0
        for request, count in enumerate(moves.counts):
            begin, end = end, end + count
            index = moves.chosen[layer, begin:end].long()
            table = moves.block_table.index_select(0, moves.slots[request : request + 1])[0]
            sources = table[index // size].long() * size + index % size
            kept = places[:, sources, heads]
            order = torch.arange(count, device=cache.device)
            targets = moves.targets[request][order // size].long() * size + order % size
            places[:, targets] = kept
