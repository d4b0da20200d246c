"""Cache contents of layers, and the groups of layers that share a block table."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import msgspec


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
    """Cache with an entry for every token, in blocks of tokens."""

    parts: tuple[CachePart, ...]
    window: int | None = None
    """A token sees itself and the `window - 1` before it; None: all before it."""


class StateCache(msgspec.Struct, frozen=True, tag="state"):
    """State of each sequence, of the same size whatever its length. It is not in blocks: a slot has
    one, and a request's first token begins from zeros."""

    parts: tuple[CachePart, ...]


class SourceCache(msgspec.Struct, frozen=True, tag="source"):
    """Cache with an entry for every token of a sequence's source, which the encoder of an
    encoder-decoder model reads: written once, in blocks of a table of its own, never longer."""

    parts: tuple[CachePart, ...]


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers that share a block table.

    All groups share one pool, and a block has the same size in each group: it holds its tokens'
    keys and values in all of the group's layers.
    """

    layers: tuple[int, ...] = ()
    """Layer numbers, in the order of the model. The i-th layer of each group shares memory with the
    i-th of every other; a group may have one layer less than others."""
    window: int | None = None
    """Window of the layers in tokens: blocks entirely before it are released; None: no window."""

    def first_block(self, position: int, block_size: int) -> int:
        """Return the first block that a query at `position`, or a later one, reads."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // block_size

    def most_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Return the most blocks that a sequence holds until `num_tokens` of it are computed, in
        chunks of up to `max_chunk`."""
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        chunk = min(max_chunk, num_tokens)
        return min(blocks, 1 + -(-(self.window + chunk - 2) // block_size))


ONE_GROUP = (CacheGroup(),)
"""One group whose layers keep all tokens: the default if the executor names no groups."""

MAX_WASTE = 1 / 8
"""Largest share of the blocks' bytes that may be padding, in groups with one layer less."""


def form_groups(
    specs: Sequence[TokenCache], *, max_model_len: int, block_size: int
) -> tuple[CacheGroup, ...]:
    """Return the groups of layers with the caches `specs`: first those without a window, then by
    descending window.

    Layers of one window are spread over as few groups as possible such that all groups have
    (nearly) equal numbers of layers. If layers differ in both tensor sizes and windows, one group
    without a window has all layers. Without layers there is one group of none: its blocks have no
    bytes, and count tokens alone.
    """
    if not specs:
        return ONE_GROUP
    windows = [
        None if spec.window is None or spec.window >= max_model_len else spec.window
        for spec in specs
    ]
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    if len(kinds) == 1:
        return (CacheGroup(tuple(range(len(specs))), windows[0]),)
    if len({spec.parts for spec in specs}) > 1:
        return (CacheGroup(tuple(range(len(specs)))),)
    order = sorted(kinds, key=lambda window: -(window or max_model_len))
    weights = {
        window: CacheGroup((), window).most_blocks(max_model_len, block_size, 1) for window in kinds
    }
    needed = sum(len(kinds[window]) * weights[window] for window in kinds)

    def taken(size: int) -> int:
        return sum(-(-len(kinds[w]) // size) * size * weights[w] for w in kinds)

    size = max(size for size in range(1, len(specs) + 1) if taken(size) <= needed * (1 + MAX_WASTE))
    groups = []
    for window in order:
        layers = kinds[window]
        count = -(-len(layers) // size)
        groups += [CacheGroup(tuple(layers[first::count]), window) for first in range(count)]
    return tuple(groups)


def sequence_blocks(
    groups: Sequence[CacheGroup], num_tokens: int, block_size: int, max_chunk: int
) -> int:
    """Return the most blocks, of all groups, that one sequence of `num_tokens` holds."""
    return sum(group.most_blocks(num_tokens, block_size, max_chunk) for group in groups)


def longest_sequence(
    groups: Sequence[CacheGroup], num_blocks: int, block_size: int, max_chunk: int, at_most: int
) -> int:
    """Return the tokens of the longest sequence that fits in `num_blocks`, up to `at_most`."""
    return bisect.bisect_right(
        range(1, at_most + 1),
        num_blocks,
        key=lambda tokens: sequence_blocks(groups, tokens, block_size, max_chunk),
    )
