"""Operations of KV compression: a part of `Operations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


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


class CompactionOperations:
    """Which tokens stay in a cache, and their move."""

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
