"""Operations of KV compression: a part of `Operations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...cache.level_options import LevelFormat
from ..kv_cache.level_cache import LevelPart, read_parts, write_parts


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


class LevelCopy(NamedTuple):
    """Tokens that go to a level's blocks (`core.cache.levels`), in all layers of a call."""

    source: LevelFormat
    sources: Sequence[int]
    """Blocks that have them, which are full."""
    target: LevelFormat
    targets: Sequence[int]
    """Blocks that they go to."""
    first: int
    """Tokens that the first of these has already."""
    num_tokens: int
    chosen: torch.Tensor | None = None
    """[L, num_tokens, 1 or num_heads] int32, on the device: which tokens they are, ascending;
    None: the first ones."""


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

    def move_levels(
        self,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        copies: Sequence[LevelCopy],
    ) -> None:
        """Convert tokens of levels, and append them to others: no copy writes what one reads.

        sources: [parts of all L layers, those of a layer together] of [num_blocks, block_size,
        num_heads, width] each, contiguous and alike; targets: likewise, maybe the same ones.
        """
        for copy in copies:
            blocks = [
                torch.tensor(each, dtype=torch.int64, device=sources[0].device)
                for each in (copy.sources, copy.targets)
            ]
            own = [LevelPart.of(part, copy.source) for part in sources]
            numbers = read_parts(own, blocks[0], sources[0].dtype)
            if copy.chosen is None:
                numbers = numbers[:, : copy.num_tokens]
            else:
                index = copy.chosen.repeat_interleave(len(sources) // len(copy.chosen), dim=0)
                index = index[..., None].expand(-1, -1, *numbers.shape[2:]).long()
                numbers = numbers.gather(1, index)
            own = [LevelPart.of(part, copy.target) for part in targets]
            write_parts(own, numbers, blocks[1], copy.first)
