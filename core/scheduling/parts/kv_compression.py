"""Decides when running requests' caches are compacted, and to what size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import msgspec

from ...cache.compacted_tables import CompactedTables
from ...cache.kv_manager import NO_HITS, PrefixHits
from ...cache.level_options import CacheLevel, LevelFormat
from ...cache.levels import LeveledTables, Step
from ...outputs import KVCompressionUsage
from ...parts.kv_compression import (
    NAME,
    Compaction,
    CompactionPlan,
    CompactionResult,
    LevelMoves,
)
from ...request import NEVER, Request
from ...sampling_params import KVCompressionParams
from ...step import StepPlan, StepResult
from ..plan_builder import PlanBuilder
from .kv_transfer import KVTransfer
from .part import PartServices, SchedulerPart

MIN_KEPT = 16
"""Fewest tokens to keep, with the first and last ones."""
GROWTH = 16
"""On admission, others' caches are assumed to grow by 1 / GROWTH."""
WORTH = 8
"""A compaction for a waiting request must free 1 / WORTH of the cache."""
PAUSE = 32
"""Plans to pause after a search freed nothing."""


Target: TypeAlias = "int | list[Step]"
"""Tokens that stay, or moves between levels."""


class CompressionRule(msgspec.Struct, frozen=True):
    ratio: float = 0.5
    """Share of tokens to keep, in (0, 1], without a budget."""
    budget: int | None = None
    """Tokens to keep."""
    interval: int = 0
    """Generated tokens between compactions; 0: only once, after the prompt."""
    prompt_interval: int = 0
    """Prompt tokens between compactions; 0: none within the prompt."""
    on_pressure: bool = False
    """Compact only when blocks run out."""
    threshold: float = 1.0
    """On pressure: share of blocks in use from which caches are compacted."""
    levels: tuple[CacheLevel, ...] = ()
    """To which tokens move as they age, instead of a ratio or budget."""
    formats: tuple[LevelFormat, ...] = ()
    """Of each level."""

    def kept_tokens(self, length: int) -> int:
        count = math.ceil(self.ratio * length) if self.budget is None else self.budget
        return min(length, max(MIN_KEPT, count))

    def next_place(self, num_computed: int, num_prompt_tokens: int) -> int:
        """Return the computed tokens at the next compaction. Within a prompt, cached blocks do not
        change the places.
        """
        if num_computed < num_prompt_tokens:
            step = self.prompt_interval or num_prompt_tokens
            return min((num_computed // step + 1) * step, num_prompt_tokens)
        return num_computed + self.interval if self.interval else NEVER

    def most_tokens(
        self, num_prompt_tokens: int, length: int, most_after: Callable[[int], int]
    ) -> int:
        """Return the most tokens cached while a sequence's first `length` tokens are computed from
        the start (a prompt, or a preempted request's). most_after: tokens to keep → most that stay.
        """
        if self.on_pressure:
            return length
        most = 0
        # The longer the sequence, the more stays: the last two stretches of each kind suffice.
        for first, end, interval in (
            (0, min(length, num_prompt_tokens), self.prompt_interval),
            (num_prompt_tokens, length, self.interval),
        ):
            last = first + (end - 1 - first) // interval * interval if interval else first
            for begin, until in ((last - interval, last), (last, end)):
                if first <= begin < until:
                    kept = min(begin, most_after(self.kept_tokens(begin))) if begin else 0
                    most = max(most, kept + until - begin)
        return most

    def of(self, params: KVCompressionParams | None) -> CompressionRule | None:
        """Return a request's rule, maybe with its own ratio or budget; None: not compacted."""
        if params is None:
            return self
        if not params.enabled:
            return None
        if params.ratio is not None:
            return msgspec.structs.replace(self, ratio=params.ratio, budget=None)
        if params.budget is not None:
            return msgspec.structs.replace(self, budget=params.budget)
        return self


class KVCompression(SchedulerPart):
    name = NAME

    min_gain = 1
    """Fewest blocks freed by a compaction."""

    def __init__(self, services: PartServices, rule: CompressionRule, block_bytes: int = 0) -> None:
        """block_bytes: of a block, for the books."""
        self._rule = rule
        self._block_bytes = block_bytes
        self._kv = services.kv
        self._tables = CompactedTables(services.kv)
        self._levels = (
            LeveledTables(services.kv, rule.levels, rule.formats) if rule.levels else None
        )
        self._requests = services.requests
        self._stats = services.stats
        self._transfers = services.parts.find(KVTransfer)
        self._places: dict[Request, int] = {}
        """Running request → computed tokens at its next compaction, if there is one."""
        self._entering: Request | None = None
        """Request that is being admitted: the worker compacts before it knows the new slot. Due at
        once if it was preempted and finds more than its prompt."""
        self._read: set[int] = set()
        """Blocks read by this plan's compactions, which none may write."""
        self._planned: dict[int, tuple[Request, Compaction | LevelMoves, int]] = {}
        """Slot → request, what moves and freed blocks, in this plan."""
        self._counts: dict[Request, int] = {}
        """Unfinished request → compactions, including before preemption."""
        self._gains: dict[Request, int] = {}
        """Request that runs, or ends → blocks freed since it began to run."""
        self._drops: dict[Request, int] = {}
        """Likewise, tokens dropped."""
        self._saved = self._missing = 0
        """Of running requests: blocks that compactions freed, and tokens that they dropped."""
        self._least_free = math.ceil((1 - rule.threshold) * services.kv.num_usable_blocks)
        """Free blocks below which caches are compacted."""
        self._num_lacking = 0
        """Blocks that the first waiting request lacked in the last plan."""
        self._promised: int | None = None
        """Likely growth of running requests in blocks, once computed."""
        self._pause = 0

    @classmethod
    def maker(
        cls, rule: CompressionRule, block_bytes: int = 0
    ) -> Callable[[PartServices], KVCompression]:
        return lambda services: cls(services, rule, block_bytes)

    # ------------------------------------------------------------ plans

    def begin_plan(self, builder: PlanBuilder) -> None:
        self._promised = None
        if self._num_lacking or self._kv.pool.num_free < self._least_free:
            self._requests.count_tokens()
            num_blocks = max(self._num_lacking, self._least_free)
            self._relieve_early(self._requests.running.requests, num_blocks)
            self._num_lacking = 0

    def plan_part(self, step: int, builder: PlanBuilder) -> CompactionPlan | None:
        if not self._planned:
            return None
        stats = self._stats
        for request, compaction, gain in self._planned.values():
            self._counts[request] = self._counts.get(request, 0) + 1
            self._gains[request] = self._gains.get(request, 0) + gain
            dropped = compaction.num_tokens - compaction.kept
            self._drops[request] = self._drops.get(request, 0) + dropped
            self._saved += gain
            self._missing += dropped
            stats.kv_compactions += 1
            stats.kv_blocks_returned += gain
            stats.kv_bytes_returned += gain * self._block_bytes
            stats.kv_tokens_compacted += compaction.num_tokens
            stats.kv_tokens_dropped += dropped
        planned = [compaction for _, compaction, _ in self._planned.values()]
        self._planned.clear()
        self._read.clear()
        return CompactionPlan(
            tuple(each for each in planned if isinstance(each, Compaction)),
            tuple(each for each in planned if isinstance(each, LevelMoves)),
        )

    def begin_result(self, plan: StepPlan, result: StepResult) -> None:
        cost: CompactionResult | None = result.parts.get(NAME)
        if cost is not None:
            self._stats.kv_compaction_seconds += cost.seconds

    # ------------------------------------------------------------ requests

    def cost(self, request: Request, hits: PrefixHits) -> int:
        """Return the likely growth of running requests, less blocks saved by this one's
        compaction.
        """
        if self._promised is None:
            self._requests.count_tokens()
            self._promised = self._likely(self._requests.running.requests)
        most = self._most_tokens(request, hits)
        return self._promised - self._tables.blocks_saved(request.num_tokens, most)

    def no_room(self, request: Request, hits: PrefixHits, reserve: int) -> None:
        """Compact for the first waiting request before the next plan's rows."""
        self._num_lacking = self._kv.blocks_missing(request.num_tokens, hits) + reserve

    def enter(self, request: Request, hits: PrefixHits) -> None:
        rule = self._rule.of(request.params.kv_compression)
        self._gains.pop(request, None)
        self._drops.pop(request, None)
        if rule is None or rule.on_pressure:
            return
        self._entering = request
        prompt = request.num_prompt_tokens
        num_computed = hits.num_blocks * self._kv.block_size
        self._places[request] = min(prompt, rule.next_place(num_computed, prompt))

    def admit(self, request: Request, hits: PrefixHits, builder: PlanBuilder) -> None:
        """Count the request's likely growth."""
        self._entering = None
        if self._promised is not None:
            most = self._most_tokens(request, hits)
            self._promised += self._kv.blocks_to_grow(request, most)

    def decides(self) -> bool:
        """Decide about rows of plans in which a compaction is due."""
        if not self._places:
            return False
        self._requests.count_tokens()
        return any(request.num_computed_tokens >= at for request, at in self._places.items())

    def look_at(self, request: Request) -> int | None:
        """Look at the row of a due compaction."""
        return self._places.get(request)

    def decode_tokens(self, request: Request, count: int, spare: int) -> int:
        """Compact a due cache before its row, which waits while drafts are undecided: until then
        only a bound of the cache's length is known.
        """
        place = self._places.get(request, NEVER)
        if request.num_unverified_tokens and request.num_computed_tokens >= place:
            return 0
        return self.chunk_tokens(request, count)

    def chunk_tokens(self, request: Request, count: int) -> int:
        """Likewise, and end a chunk at the next compaction."""
        computed = request.num_computed_tokens
        place = self._places.get(request, NEVER)
        if count and computed >= place and request is not self._entering:
            self._compact_due(request)
            place = self._places.get(request, NEVER)
        return place - computed if computed < place < computed + count else count

    def leave(self, request: Request) -> None:
        self._planned.pop(request.slot, None)  # Neither its gain nor what it drops was counted.
        self._saved -= self._gains.get(request, 0)
        self._missing -= self._drops.get(request, 0)
        self._places.pop(request, None)

    def ended(self, request: Request) -> None:
        count, gain = self._counts.pop(request, 0), self._gains.pop(request, 0)
        dropped = self._drops.pop(request, 0)
        if request.compacted:
            request.compression_usage = KVCompressionUsage(
                request.num_computed_tokens - dropped, dropped, count, gain * self._block_bytes
            )

    @property
    def counts(self) -> dict[str, Any]:
        self._requests.count_tokens()
        running = self._requests.running.requests
        levels = {} if self._levels is None else self._levels.blocks_saved(running)
        return {
            "kv_level_bytes_saved": {
                level: round(blocks * self._block_bytes) for level, blocks in levels.items()
            },
            "kv_bytes_saved": self._saved * self._block_bytes,
            "kv_tokens_missing": self._missing,
            "kv_tokens_computed": sum(request.num_computed_tokens for request in running),
        }

    def compact_all(self) -> int:
        """Compact the caches of running requests at their next rows, where blocks come back. Return
        how many are to be.
        """
        count = 0
        self._requests.count_tokens()
        for request in self._requests.running.requests:
            rule = self._rule.of(request.params.kv_compression)
            if rule is not None and self._gain(request, rule)[0] >= self.min_gain:
                self._places[request] = request.look_at = 0
                count += 1
        return count

    def _most_tokens(self, request: Request, hits: PrefixHits) -> int:
        """Return the most tokens cached until all are computed; shared cached blocks may prevent
        compaction.
        """
        rule, length = self._rule.of(request.params.kv_compression), request.num_tokens
        if rule is None or hits.num_blocks:
            return length
        most_after: Callable[[int], int] = self._tables.most_after
        if self._levels is not None:
            rule, most_after = msgspec.structs.replace(rule, ratio=1.0), self._levels.most_tokens
        return rule.most_tokens(request.num_prompt_tokens, length, most_after)

    def _likely(self, requests: Iterable[Request]) -> int:
        """Return running requests' likely growth in blocks: until prompts are computed, or another
        `GROWTH`th of generated ones.

        Preempting a compacted request costs its whole prompt, more than its blocks are worth.
        """
        grow, likely = self._kv.blocks_to_grow, 0
        for request in requests:
            if request.num_tokens - request.num_computed_tokens > 1:
                likely += grow(request, self._most_tokens(request, NO_HITS))
            else:
                size, columns = self._kv.block_size, len(request.tables[0])
                left = max(0, request.max_total_tokens - request.num_tokens)
                length = columns * size + min(columns // GROWTH * size, left)
                # Steps that decode take few tokens: blocks of windows are not for a prompt's.
                likely += grow(request, length, size)
        return likely

    # ------------------------------------------------------------ compactions

    def _compact_due(self, request: Request) -> None:
        """Compact a due request if that frees blocks.

        Without room it is retried at the next token. With a KV connector, the prompt's blocks stay
        until saved.
        """
        rule, transfers = self._rule.of(request.params.kv_compression), self._transfers
        assert rule is not None, "no compaction is due"
        gain, target = self._gain(request, rule, () if transfers is None else transfers.held)
        if gain < self.min_gain or self._compact_held(request, target, gain):
            place = rule.next_place(request.num_computed_tokens, request.num_prompt_tokens)
            if place == NEVER:
                del self._places[request]
            else:
                self._places[request] = place

    def relieve(self, requests: list[Request]) -> bool:
        """Compact the cache, among those waiting for pressure, that frees most."""
        return self._relieve(requests)

    def _relieve(self, requests: Iterable[Request], *, worth: int | None = None) -> bool:
        """worth: skip caches that free less than 1 / worth of their blocks."""
        if not self._rule.on_pressure:
            return False
        best: tuple[int, Target, Request] | None = None
        undecided: tuple[int, Request] | None = None
        for request in requests:
            rule = self._rule.of(request.params.kv_compression)
            decodes = request.num_tokens - request.num_computed_tokens == 1
            ends = request.num_tokens >= request.max_total_tokens
            if rule is None or not decodes or ends or not request.prompt_computed:
                continue
            if request.slot in self._planned:
                continue
            gain, target = self._gain(request, rule)
            if worth is not None and gain * worth < self._kv.num_held(request):
                continue
            if gain > 0 and request.num_unverified_tokens:
                if undecided is None or gain > undecided[0]:
                    undecided = gain, request
            elif gain > 0 and (best is None or gain > best[0]):
                best = gain, target, request
        if best is not None:
            gain, target, request = best
            return self._compact(request, target, gain)
        if undecided is not None:
            # Compacted at its next row, which waits until its drafts are decided.
            _, request = undecided
            self._places[request] = request.look_at = 0
        return False

    def _relieve_early(self, requests: Iterable[Request], num_blocks: int) -> None:
        """Compact until `num_blocks` are free, before the plan's rows."""
        if self._pause:
            self._pause -= 1
            return
        while self._kv.pool.num_free < num_blocks:
            if not self._relieve(requests, worth=WORTH):
                if not self._transfers:  # None, or without blocks that soon come back.
                    self._pause = PAUSE
                break

    def _gain(
        self, request: Request, rule: CompressionRule, transfers: Iterable[int] = ()
    ) -> tuple[int, Target]:
        """Return the freed blocks of a compaction, and what it leaves.

        transfers: references to ignore.
        """
        if self._levels is not None:
            steps = self._levels.steps(request, transfers)
            return sum(step.gain for step in steps), steps
        num_tokens = request.num_kv_tokens
        kept = min(rule.kept_tokens(request.num_computed_tokens), num_tokens)
        kept = self._tables.possible_length(num_tokens, kept)
        return self._tables.gain(request, kept, transfers), kept

    def _compact_held(self, request: Request, target: Target, gain: int) -> bool:
        if self._transfers is not None:
            self._transfers.hold_prompt(request)
        if self._compact(request, target, gain):
            return True
        if self._transfers is not None:
            self._transfers.let_prompt_go(request)
        return False

    def _compact(self, request: Request, target: Target, gain: int) -> bool:
        self._requests.recount(request)
        if isinstance(target, int):
            compaction = self._tables.compact(request, target, self._read)
            if compaction is None:
                return False
            self._planned[request.slot] = request, compaction, gain
            return True
        assert self._levels is not None, "steps are of levels"
        moved = self._levels.move(request, target)
        if moved is None:
            return False
        self._planned[request.slot] = request, *moved
        return True
