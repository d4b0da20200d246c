"""KV compression: compactions in plans, and the time that they took."""

from __future__ import annotations

import msgspec

from ..step import PartPlan

NAME = "kv_compression"


class Compaction(msgspec.Struct, frozen=True):
    """A slot's cache moves to other blocks, and loses tokens on the way.

    The plan says how many tokens stay; the device chooses which, as many in each layer and KV head,
    by the KV compressor (`EngineConfig.kv_compression`). Positions do not change: the slot's length
    and that of its cache differ from then on. The source blocks are only read, unless the new table
    has them, in the order that they had: then the cache is compacted in place. Rows of the same
    plan may already write to them, since compactions run before any row.

    Layers with a window or chunks lose the oldest tokens, which they do not see any more. In a
    group of their own nothing moves: its table begins that many columns later. The dropped tokens
    are a multiple of `Reach.alignment` and of what a column holds, so that places in the cache say
    where a window or a chunk begins, as positions do without compactions.
    """

    slot: int
    num_tokens: int
    """Tokens in the slot's cache until now."""
    kept: int
    """Tokens that stay, 1 .. num_tokens, in the order that they had."""
    tables: tuple[tuple[int, ...], ...]
    """Per group of layers, [ceil(kept / block_size)]: the slot's table from then on."""


class LevelTarget(msgspec.Struct, frozen=True):
    """Where tokens go that move to another level (`core.cache.levels`)."""

    level: int
    """1 or more."""
    first: int
    """Tokens that the first block has already."""
    kept: int
    """Tokens that are appended, 1 or more, in the order that they had."""
    blocks: tuple[tuple[int, ...], ...]
    """Per group of layers, those that are written; () for groups that keep what they see."""


class LevelMove(msgspec.Struct, frozen=True):
    """Tokens move from one level to another, or are dropped.

    With several targets, the most important ones go to the first, the next ones to the second. The
    device chooses which these are, as with a `Compaction`. All blocks are read before any is
    written, since the targets may be among them.
    """

    source: int
    """Level."""
    num_tokens: int
    """In the blocks below, which are full."""
    blocks: tuple[tuple[int, ...], ...]
    """Per group of layers, as above."""
    targets: tuple[LevelTarget, ...]


class LevelMoves(msgspec.Struct, frozen=True):
    """What moves in a slot's cache. Positions do not change."""

    slot: int
    num_computed: int
    """Tokens of the sequence that are computed."""
    num_dropped: int
    """What is subtracted from a position for its place in the cache from then on."""
    moves: tuple[LevelMove, ...]
    """In order, one after the other."""
    tables: tuple[tuple[int, ...], ...]
    """Per group of layers: the slot's table from then on."""
    level_tokens: tuple[int, ...]
    """Tokens of each level from 1 on, from then on."""

    @property
    def num_tokens(self) -> int:
        return sum(move.num_tokens for move in self.moves)

    @property
    def kept(self) -> int:
        return sum(target.kept for move in self.moves for target in move.targets)


class CompactionPlan(PartPlan, frozen=True):
    """The compactions of a plan, which run before all else but released slots."""

    compactions: tuple[Compaction, ...] = ()
    """In any order, or all at once: none writes a block that another one reads."""
    moves: tuple[LevelMoves, ...] = ()
    """In order, one after the other: later ones may write what earlier ones have read."""


class CompactionResult(msgspec.Struct, frozen=True):
    seconds: float
    """On the device."""
