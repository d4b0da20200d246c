"""Block tables of compacted caches: how far one may shrink, what that frees, and its new blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice

from ..parts.kv_compression import Compaction
from ..request import Request
from .kv_manager import KVCacheManager


class CompactedTables:
    """Drops tokens of requests from the tables of groups that see all of them; of groups with a
    window or chunks only what is out of their reach."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        reaches = chain.from_iterable((g.reach, *g.inner_reaches) for g in kv.groups)
        self._reaches = [reach for reach in reaches if reach is not None]
        """All layers', with a window or chunks."""
        has_local = len(kv.whole_groups) < len(kv.groups)
        self._drop_unit = math.lcm(
            kv.block_size if has_local else 1, *(reach.alignment for reach in self._reaches)
        )
        """Compactions drop multiples of this."""

    def possible_length(self, num_tokens: int, kept: int) -> int:
        """Return the fewest tokens, `kept` or more, to which a cache of `num_tokens` can be
        compacted: what the next token sees in a window or in chunks stays.
        """
        if not self._reaches:
            return kept
        seen = min(reach.first_visible(num_tokens) for reach in self._reaches)
        unit = self._drop_unit
        return num_tokens - max(0, min(num_tokens - kept, seen)) // unit * unit

    def most_after(self, kept: int) -> int:
        """Return a bound of `possible_length`, of however many tokens."""
        if not self._reaches:
            return kept
        longest = max(reach.most_tokens for reach in self._reaches)
        return max(kept, longest) + self._drop_unit - 1

    def blocks_saved(self, num_tokens: int, most: int) -> int:
        """Return the blocks, over groups, that a sequence needs less if its cache never holds more
        than `most` of `num_tokens`.
        """
        columns = self._kv.blocks_for(num_tokens) - self._kv.blocks_for(most)
        return len(self._kv.whole_groups) * columns

    def gain(self, request: Request, kept: int, transfers: Iterable[int] = ()) -> int:
        """Return how many blocks a compaction to `kept` tokens would free; negative if others hold
        its blocks. transfers: references to ignore.
        """
        pool, gain, references = self._kv.pool, 0, Counter[int]()
        for number in self._kv.whole_groups:
            table = request.tables[number]
            num_private = sum(map(pool.is_private, table))
            if num_private < len(table) and (references := references or Counter(transfers)):
                num_private = sum(pool.num_holders(each) - references[each] == 1 for each in table)
            gain += num_private - self._kv.blocks_for(kept)
        return gain

    def compact(self, request: Request, kept: int, read: set[int]) -> Compaction | None:
        """Give the request blocks for `kept` of its tokens, a `possible_length`, and release the
        others; None, unchanged, without room.

        Prefers fresh blocks, so that the prompt's stay cached; otherwise its first own ones, unless
        shared. Blocks of groups with a reach stay as they are.

        read: blocks read by compactions of the plan, which this one must not write; its own are
        added.
        """
        kv, pool = self._kv, self._kv.pool
        num_tokens, count = request.num_kv_tokens, kv.blocks_for(kept)
        whole = [request.tables[number] for number in kv.whole_groups]
        kv.register(request)
        first = [block_id for table in whole for block_id in table[:count]]
        needed = count * len(whole)
        fresh = pool.next_free(needed)
        if len(fresh) == needed and read.isdisjoint(fresh):
            new = iter(pool.allocate(needed))
            for number, table in zip(kv.whole_groups, whole, strict=True):
                pool.release(table)
                request.tables[number] = list(islice(new, count))
        elif all(map(pool.is_private, first)) and read.isdisjoint(first):
            for block_id in first:
                pool.forget(block_id)
            for number, table in zip(kv.whole_groups, whole, strict=True):
                pool.release(table[count:])
                request.tables[number] = table[:count]
        else:
            return None
        read.update(chain.from_iterable(whole))
        kv.drop_columns(request, (num_tokens - kept) // kv.block_size)
        request.compacted = True
        request.num_dropped_tokens += num_tokens - kept
        return Compaction(request.slot, num_tokens, kept, tuple(map(tuple, request.tables)))
