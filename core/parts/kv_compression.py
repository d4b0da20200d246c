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


class CompactionPlan(PartPlan, frozen=True):
    """The compactions of a plan, which run before all else but released slots."""

    compactions: tuple[Compaction, ...]
    """In any order, or all at once: none writes a block that another one reads."""


class CompactionResult(msgspec.Struct, frozen=True):
    seconds: float
    """On the device."""
