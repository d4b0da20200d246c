"""Levels of a KV cache: older tokens in fewer bits, and fewer of them, in blocks of equal bytes.

A request's newest tokens stay as they were computed: level 0. With some age they move to a level of
`EngineConfig.kv_compression_levels`, in blocks of the same pool: a block of 8 bits holds about
twice, one of 4 bits about four times as many tokens. A table has the blocks of level 1, then those
of level 2 and so on, then those of level 0. All else counts a block of a level as `block_size`
tokens, so that places in the cache go on saying which column a token has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
from typing import NamedTuple

from ..parts.kv_compression import LevelMove, LevelMoves, LevelTarget
from ..request import Request
from .kv_manager import KVCacheManager
from .level_options import WHOLE, CacheLevel, LevelFormat


class Step(NamedTuple):
    """What moves from a level: its oldest blocks, which are full."""

    source: int
    num_blocks: int
    num_tokens: int
    num_positions: int
    """Tokens of the sequence that these stand for."""
    kept: tuple[tuple[int, int], ...]
    """(level, tokens) that take them in."""
    gain: int
    """Blocks that come back, over groups."""


class LeveledTables:
    """Moves requests' tokens from level to level, as they age."""

    def __init__(
        self, kv: KVCacheManager, levels: Sequence[CacheLevel], formats: Sequence[LevelFormat]
    ) -> None:
        """formats: [len(levels)]"""
        self._kv = kv
        self._levels = (CacheLevel(WHOLE, 1.0, 0), *levels)
        self._sizes = (kv.block_size, *(each.tokens for each in formats))
        """Level → tokens of a block."""
        numbers = range(len(self._levels))
        self._ages = [
            list(group) for _, group in groupby(numbers, key=lambda n: self._levels[n].age)
        ]
        """Levels of each age, from the newest."""

    def most_tokens(self, num_tokens: int) -> int:
        """Return a bound of what a cache of `num_tokens` counts as once its tokens were moved."""
        begins = [self._levels[group[0]].age for group in self._ages]
        columns = self._columns(0, begins[1]) + 1
        for group, begin, end in zip(
            self._ages[1:], begins[1:], [*begins[2:], num_tokens], strict=True
        ):
            within = max(0, min(end, num_tokens) - begin)
            for number in group:
                # What is not a whole block of it stays a level longer than its age says.
                tokens = int(self._levels[number].share * within) + 1
                columns += self._columns(number, tokens) + 2
        return min(num_tokens, columns * self._kv.block_size)

    def tokens(self, request: Request) -> list[int]:
        """Return how many tokens of the request each level has."""
        older = list(request.level_tokens) or [0] * (len(self._levels) - 1)
        columns = sum(map(self._columns, range(1, len(self._levels)), older))
        return [request.num_kv_tokens - columns * self._kv.block_size, *older]

    def blocks_saved(self, requests: Iterable[Request]) -> dict[str, float]:
        """Return for each level how many blocks, over groups, its tokens would take besides if they
        had not moved.
        """
        groups, size = len(self._kv.whole_groups), self._kv.block_size
        saved = {level.name: 0.0 for level in self._levels[1:]}
        for request in requests:
            counts = zip(request.level_positions, request.level_tokens, strict=True)
            for number, (positions, tokens) in enumerate(counts, 1):
                columns = positions / size - self._columns(number, tokens)
                saved[self._levels[number].name] += columns * groups
        return saved

    def steps(self, request: Request, transfers: Iterable[int] = ()) -> list[Step]:
        """Return the moves of tokens that have the age of an older level, where blocks come back.
        transfers: references to ignore.
        """
        tokens = self.tokens(request)
        positions = [tokens[0], *(request.level_positions or [0] * (len(tokens) - 1))]
        first = sum(map(self._columns, range(1, len(tokens)), tokens[1:]))
        references = Counter(transfers)
        steps: list[Step] = []
        # The oldest level first, from the oldest source: a token is rounded as rarely as possible.
        for target in range(len(self._ages) - 1, 0, -1):
            for source in range(target - 1, -1, -1):
                number = self._ages[source][0]
                step = self._step(tokens, positions, number, self._ages[target])
                if step is None:
                    continue
                gain = len(self._kv.whole_groups) * -self._new_blocks(step, tokens)
                gain += step.num_blocks * len(self._kv.whole_groups)
                if number == 0:
                    gain -= self._shared(request, first, first + step.num_blocks, references)
                if gain <= 0:
                    continue
                first += step.num_blocks if number == 0 else 0
                steps.append(step._replace(gain=gain))
                self._count(step, tokens, positions)
        return steps

    def _step(
        self, tokens: Sequence[int], positions: Sequence[int], source: int, group: Sequence[int]
    ) -> Step | None:
        """Return the move of a level's blocks whose tokens have the age of `group`, levels."""
        age = self._levels[group[0]].age
        old = min(sum(positions[: source + 1]) - age, positions[source])
        if old <= 0 or not tokens[source]:
            return None
        size = self._sizes[source]
        num_blocks = old * tokens[source] // positions[source] // size
        if not num_blocks:
            return None
        moved = left = num_blocks * size
        kept = []
        for number in group:
            share = self._levels[number].share / self._levels[source].share
            count = min(left, max(1, round(share * moved)))
            left -= count
            if count:
                kept.append((number, count))
        num_positions = round(positions[source] * moved / tokens[source])
        return Step(source, num_blocks, moved, num_positions, tuple(kept), 0)

    def _columns(self, level: int, num_tokens: int) -> int:
        return -(-num_tokens // self._sizes[level])

    def _new_blocks(self, step: Step, tokens: Sequence[int]) -> int:
        """Return the blocks that a step fills besides those that are begun, in each group."""
        return sum(
            self._columns(level, tokens[level] + kept) - self._columns(level, tokens[level])
            for level, kept in step.kept
        )

    def _shared(self, request: Request, first: int, end: int, references: Counter[int]) -> int:
        """Return how many blocks of these columns others have, too, over groups."""
        pool = self._kv.pool
        return sum(
            pool.num_holders(block_id) - references[block_id] > 1
            for number in self._kv.whole_groups
            for block_id in request.tables[number][first:end]
        )

    @staticmethod
    def _count(step: Step, tokens: list[int], positions: list[int]) -> None:
        tokens[step.source] -= step.num_tokens
        positions[step.source] -= step.num_positions
        for level, kept in step.kept:
            tokens[level] += kept
        positions[step.kept[0][0]] += step.num_positions

    def move(self, request: Request, steps: Sequence[Step]) -> tuple[LevelMoves, int] | None:
        """Give the request its blocks after these steps, as many of the first ones as there is room
        for, and release the others. Return how many come back; None, unchanged, without room.
        """
        kv, groups = self._kv, self._kv.whole_groups
        kv.register(request)
        tokens = self.tokens(request)
        positions = [tokens[0], *(request.level_positions or [0] * (len(tokens) - 1))]
        segments = {number: self._segments(request.tables[number], tokens) for number in groups}
        moves: list[LevelMove] = []
        columns = gain = 0
        for step in steps:
            count = self._new_blocks(step, tokens)
            sources = {n: segments[n][step.source][: step.num_blocks] for n in groups}
            fresh = self._take(count * len(groups), list(chain.from_iterable(sources.values())))
            if fresh is None:
                break
            targets = []
            for level, kept in step.kept:
                had = tokens[level]
                has_partial_block = self._columns(level, had) - had // self._sizes[level]
                end = self._columns(level, had + kept)
                tables: list[tuple[int, ...]] = [()] * len(kv.groups)
                for number in groups:
                    segment = segments[number][level]
                    segment += [fresh.pop() for _ in range(end - len(segment))]
                    tables[number] = tuple(segment[had // self._sizes[level] : end])
                first = had % self._sizes[level] if has_partial_block else 0
                targets.append(LevelTarget(level, first, kept, tuple(tables)))
            blocks: list[tuple[int, ...]] = [()] * len(kv.groups)
            for number, own in sources.items():
                blocks[number] = tuple(own)
                del segments[number][step.source][: step.num_blocks]
            moves.append(LevelMove(step.source, step.num_tokens, tuple(blocks), tuple(targets)))
            self._count(step, tokens, positions)
            columns += step.num_blocks - count
            gain += step.gain
        if not moves:
            return None
        for number in groups:
            newest, *older = segments[number]
            request.tables[number] = [*chain.from_iterable(older), *newest]
        kv.drop_columns(request, columns)
        request.compacted = True
        request.num_dropped_tokens += columns * kv.block_size
        request.level_tokens, request.level_positions = tuple(tokens[1:]), tuple(positions[1:])
        moved = LevelMoves(
            request.slot, request.num_computed_tokens, request.num_dropped_tokens, tuple(moves),
            tuple(map(tuple, request.tables)), request.level_tokens,
        )  # fmt: skip
        return moved, gain

    def _take(self, count: int, sources: Sequence[int]) -> list[int] | None:
        """Release the sources of a move, and return `count` other blocks, or some of them: they are
        read before any is written. None, unchanged, without room.
        """
        pool = self._kv.pool
        if pool.num_free >= count:
            fresh = pool.allocate(count)
            pool.release(sources)
            return fresh
        own = [block_id for block_id in sources if pool.is_private(block_id)][:count]
        if len(own) < count:
            return None
        for block_id in own:
            pool.forget(block_id)
        used = set(own)
        pool.release([block_id for block_id in sources if block_id not in used])
        return own

    def _segments(self, table: Sequence[int], tokens: Sequence[int]) -> list[list[int]]:
        """Return a table's blocks by level."""
        older: list[list[int]] = []
        begin = 0
        for level in range(1, len(tokens)):
            end = begin + self._columns(level, tokens[level])
            older.append(list(table[begin:end]))
            begin = end
        return [list(table[begin:]), *older]
