"""Cache contents of layers, and the groups of layers that share a block table."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import msgspec

from .reach import Reach


class CachePart(msgspec.Struct, frozen=True):
    """One tensor of a layer's cache: [count, num_blocks, block_size, *shape] for tokens,
    [num_states, *shape] for states."""

    name: str
    """"kv", "conv", "ssm", …"""
    shape: tuple[int, ...]
    """Shape for one token, or for one sequence."""
    dtype: str
    """Torch's name: "bfloat16", …"""
    count: int = 1
    """Number of such entries per token: keys and values are one part with two."""


class TokenCache(msgspec.Struct, frozen=True, tag="tokens"):
    """Entries per token, in blocks."""

    parts: tuple[CachePart, ...]
    reach: Reach | None = None
    """None: all earlier tokens."""


class StateCache(msgspec.Struct, frozen=True, tag="state"):
    """Fixed-size state per sequence: one per slot, not in blocks, initially zeros."""

    parts: tuple[CachePart, ...]


class SourceCache(msgspec.Struct, frozen=True, tag="source"):
    """Entries per source token of an encoder-decoder model, written once, in a block table of its
    own.
    """

    parts: tuple[CachePart, ...]


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers that share a block table.

    All groups share one pool, and a block has the same size in each group: it holds its tokens'
    keys and values in all of the group's layers.
    """

    layers: tuple[int, ...] = ()
    """Layer numbers, in the order of the model. The i-th layer of each group shares memory with the
    i-th of every other; a group may have one layer less than others."""
    reach: Reach | None = None
    """How far back its layers see: blocks entirely before it are released; None: no block is."""
    inner_reaches: tuple[Reach, ...] = ()
    """Without a reach: those of layers that see less than the group keeps."""

    def first_block(self, position: int, block_size: int) -> int:
        """Return the first block that a query at `position`, or a later one, reads."""
        if self.reach is None:
            return 0
        return max(0, self.reach.first_visible(position)) // block_size

    def most_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Return the most blocks that a sequence holds until `num_tokens` of it are computed, in
        chunks of up to `max_chunk`."""
        blocks = -(-num_tokens // block_size)
        if self.reach is None:
            return blocks
        tokens = self.reach.most_tokens - 1 + min(max_chunk, num_tokens)
        # Of the first block, what is before the reach's first position, at most.
        before = block_size - math.gcd(self.reach.alignment, block_size)
        return min(blocks, -(-(before + tokens) // block_size))


ONE_GROUP = (CacheGroup(),)
"""Default: one group that keeps all tokens."""

MAX_WASTE = 1 / 8
"""Largest padded share of blocks, in groups with one layer less."""


def one_group(reaches: Sequence[Reach | None]) -> CacheGroup:
    """Return a group of layers with these reaches that keeps all tokens."""
    inner = tuple(dict.fromkeys(reach for reach in reaches if reach is not None))
    return CacheGroup(tuple(range(len(reaches))), None, inner)


def form_groups(
    specs: Sequence[TokenCache], *, max_model_len: int, block_size: int
) -> tuple[CacheGroup, ...]:
    """Return groups of layers with caches `specs`: those that see all tokens, then by descending
    reach.

    Layers of one reach form as few groups as give all groups nearly equal sizes. If both tensor
    sizes and reach differ, one group has all layers and keeps all tokens. Without layers, one empty
    group's blocks only count tokens.
    """
    if not specs:
        return ONE_GROUP
    reaches = [
        None if spec.reach is None or spec.reach.most_tokens >= max_model_len else spec.reach
        for spec in specs
    ]
    kinds: dict[Reach | None, list[int]] = {}
    for layer, reach in enumerate(reaches):
        kinds.setdefault(reach, []).append(layer)
    if len(kinds) == 1:
        return (CacheGroup(tuple(range(len(specs))), reaches[0]),)
    if len({spec.parts for spec in specs}) > 1:
        return (one_group(reaches),)
    order = sorted(kinds, key=lambda reach: -(reach.most_tokens if reach else max_model_len))
    weights = {
        reach: CacheGroup((), reach).most_blocks(max_model_len, block_size, 1) for reach in kinds
    }
    needed = sum(len(kinds[reach]) * weights[reach] for reach in kinds)

    def taken(size: int) -> int:
        return sum(-(-len(kinds[reach]) // size) * size * weights[reach] for reach in kinds)

    size = max(size for size in range(1, len(specs) + 1) if taken(size) <= needed * (1 + MAX_WASTE))
    groups = []
    for reach in order:
        layers = kinds[reach]
        count = -(-len(layers) // size)
        groups += [CacheGroup(tuple(layers[first::count]), reach) for first in range(count)]
    return tuple(groups)


def sequence_blocks(
    groups: Sequence[CacheGroup], num_tokens: int, block_size: int, max_chunk: int
) -> int:
    """Return the most blocks, over groups, of a sequence of `num_tokens`."""
    return sum(group.most_blocks(num_tokens, block_size, max_chunk) for group in groups)


def longest_sequence(
    groups: Sequence[CacheGroup], num_blocks: int, block_size: int, max_chunk: int, at_most: int
) -> int:
    """Return the longest sequence that fits in `num_blocks`, up to `at_most`."""
    return bisect.bisect_right(
        range(1, at_most + 1),
        num_blocks,
        key=lambda tokens: sequence_blocks(groups, tokens, block_size, max_chunk),
    )
