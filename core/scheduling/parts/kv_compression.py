"""Decides when the caches of running requests are compacted, and how much of them stays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec

from ...cache.kv_manager import NO_HITS, PrefixHits
from ...outputs import KVCompressionUsage
from ...parts.kv_compression import NAME, Compaction, CompactionPlan, CompactionResult
from ...request import NEVER, Request
from ...sampling_params import KVCompressionParams
from ...step import StepPlan, StepResult
from ..plan_builder import PlanBuilder
from .kv_transfer import KVTransfer
from .part import PartServices, SchedulerPart

MIN_KEPT = 16
"""Fewest tokens that stay: below this, even the first and the last tokens would be dropped."""
GROWTH = 16
"""A request is admitted beside others whose caches may grow by one part in so many."""
WORTH = 8
"""A cache is compacted for the sake of a waiting request if one in so many of its blocks comes
back."""
PAUSE = 32
"""Plans without a look for blocks for waiting requests, after none came back."""


class CompressionRule(msgspec.Struct, frozen=True):
    """How much of a cache stays, and when it is compacted."""

    ratio: float = 0.5
    """Share of the sequence's tokens that stays, 0 (excluded) to 1, unless there is a budget."""
    budget: int | None = None
    """Tokens that stay."""
    interval: int = 0
    """Tokens generated between two compactions; 0: only once, after the prompt."""
    prompt_interval: int = 0
    """Prompt tokens computed between two compactions; 0: none before the prompt is computed."""
    on_pressure: bool = False
    """Compact only when blocks run out, instead of after the prompt and at intervals."""

    def kept_tokens(self, length: int) -> int:
        """Return how many tokens of a sequence of `length` stay."""
        count = math.ceil(self.ratio * length) if self.budget is None else self.budget
        return min(length, max(MIN_KEPT, count))

    def next_place(self, num_computed: int, num_prompt_tokens: int) -> int:
        """Return the computed tokens with which a cache is compacted next. In a prompt, the places
        are the same wherever its computation began, after cached blocks or not."""
        if num_computed < num_prompt_tokens:
            step = self.prompt_interval or num_prompt_tokens
            return min((num_computed // step + 1) * step, num_prompt_tokens)
        return num_computed + self.interval if self.interval else NEVER

    def most_tokens(self, num_prompt_tokens: int, length: int) -> int:
        """Return how many tokens the cache of a sequence holds at most while its first `length`
        tokens are computed: a prompt, or a preempted request's, from the first one on."""
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
                    kept = self.kept_tokens(begin) if begin else 0
                    most = max(most, kept + until - begin)
        return most

    def of(self, params: KVCompressionParams | None) -> CompressionRule | None:
        """Return the rule of a request, which may have a ratio or a budget of its own; None: its
        cache stays whole."""
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
    """The compactions of each plan."""

    name = NAME

    min_gain = 1
    """Blocks that must come back for a cache to be compacted."""

    def __init__(self, services: PartServices, rule: CompressionRule) -> None:
        self._rule = rule
        self._kv = services.kv
        self._requests = services.requests
        self._stats = services.stats
        self._transfers = services.parts.find(KVTransfer)
        self._places: dict[Request, int] = {}
        """Running request → computed tokens with which its cache is compacted next."""
        self._read: set[int] = set()
        """Blocks that the compactions of this plan read: none of them may write there."""
        self._planned: dict[int, tuple[Request, Compaction, int]] = {}
        """Slot → request, compaction and blocks that come back, in the plan that is being built."""
        self._counts: dict[Request, int] = {}
        """Unfinished request → how often its cache was compacted, those before a preemption
        included."""
        self._wanted = 0
        """Blocks that the first waiting request lacked when the last plan was made."""
        self._promised: int | None = None
        """Blocks that running requests are likely to take, once a plan has asked for them."""
        self._pause = 0

    @classmethod
    def maker(cls, rule: CompressionRule) -> Callable[[PartServices], KVCompression]:
        """Return what makes the part."""
        return lambda services: cls(services, rule)

    # ------------------------------------------------------------ plans

    def begin_plan(self, builder: PlanBuilder) -> None:
        """Compact caches for the first waiting request, if it found too few blocks."""
        self._promised = None
        if self._wanted:
            self._relieve_admission(self._requests.running.requests, self._wanted)
            self._wanted = 0

    def plan_part(self, step: int, builder: PlanBuilder) -> CompactionPlan | None:
        """Return the compactions of the plan, and begin the next one."""
        if not self._planned:
            return None
        stats = self._stats
        for request, compaction, gain in self._planned.values():
            self._counts[request] = self._counts.get(request, 0) + 1
            stats.kv_compactions += 1
            stats.kv_blocks_returned += gain
            stats.kv_tokens_compacted += compaction.num_tokens
            stats.kv_tokens_dropped += compaction.num_tokens - compaction.kept
        compactions = tuple(compaction for _, compaction, _ in self._planned.values())
        self._planned.clear()
        self._read.clear()
        return CompactionPlan(compactions)

    def begin_result(self, plan: StepPlan, result: StepResult) -> None:
        """Count the time that compactions took."""
        cost: CompactionResult | None = result.parts.get(NAME)
        if cost is not None:
            self._stats.kv_compaction_seconds += cost.seconds

    # ------------------------------------------------------------ requests

    def cost(self, request: Request, hits: PrefixHits) -> int:
        """Return the blocks that running requests are likely to take, less those that this one will
        not need, because its cache is compacted in time."""
        if self._promised is None:
            self._promised = self._likely(self._requests.running.requests)
        saved = self._kv.blocks_for(request.num_tokens) - self._most_blocks(request, hits)
        return self._promised - saved

    def no_room(self, request: Request, hits: PrefixHits, reserve: int) -> None:
        """Let caches be compacted for the first waiting request before the next plan's rows."""
        missing = self._kv.blocks_for(request.num_tokens) - hits.num_blocks
        self._wanted = missing + reserve

    def enter(self, request: Request, hits: PrefixHits) -> None:
        """Set when the cache of a request is first compacted."""
        rule = self._rule.of(request.params.kv_compression)
        if rule is None or rule.on_pressure:
            return
        prompt = request.num_prompt_tokens
        num_computed = hits.num_blocks * self._kv.block_size
        self._places[request] = min(prompt, rule.next_place(num_computed, prompt))

    def admit(self, request: Request, hits: PrefixHits, builder: PlanBuilder) -> None:
        """Count the blocks that the request is likely to take besides those that it has."""
        if self._promised is not None:
            self._promised += self._most_blocks(request, hits) - len(request.tables[0])

    def look_at(self, request: Request) -> int | None:
        """Look at the row with which a cache is due."""
        return self._places.get(request)

    def decode_tokens(self, request: Request, count: int, spare: int) -> int:
        """Compact a cache that is due, before its row is planned."""
        return self.chunk_tokens(request, count)

    def chunk_tokens(self, request: Request, count: int) -> int:
        """Likewise, and end a chunk where the next compaction is."""
        computed = request.num_computed_tokens
        place = self._places.get(request, NEVER)
        if count and computed >= place:
            self._compact_due(request)
            place = self._places[request]
        return place - computed if computed < place < computed + count else count

    def leave(self, request: Request) -> None:
        """Leave a slot out of the plan, as its request leaves it."""
        self._planned.pop(request.slot, None)
        self._places.pop(request, None)

    def ended(self, request: Request) -> None:
        """Say what is left of the request's cache."""
        count = self._counts.pop(request, 0)
        if request.compacted:
            request.compression_usage = KVCompressionUsage(
                request.num_kv_tokens, request.num_dropped_tokens, count
            )

    def _most_blocks(self, request: Request, hits: PrefixHits) -> int:
        """Return how many blocks the request holds at most until all of its tokens are computed,
        with cached blocks, which others may hold, too: then it may stay whole."""
        rule = self._rule.of(request.params.kv_compression)
        most = request.num_tokens
        if rule is not None and not hits.num_blocks:
            most = rule.most_tokens(request.num_prompt_tokens, request.num_tokens)
        return self._kv.blocks_for(most)

    def _likely(self, requests: Iterable[Request]) -> int:
        """Return how many more blocks running requests are likely to take: until their prompts are
        computed, or, for what they generate, another `GROWTH`th of what they have.

        To preempt a request whose cache was compacted costs more than the blocks that come back
        are worth: its whole prompt is computed again.
        """
        blocks_for, likely = self._kv.blocks_for, 0
        for request in requests:
            num_blocks = len(request.tables[0])
            if request.num_tokens - request.num_computed_tokens > 1:
                likely += max(0, self._most_blocks(request, NO_HITS) - num_blocks)
            else:
                left = request.max_total_tokens - request.num_tokens
                likely += min(num_blocks // GROWTH, blocks_for(left))
        return likely

    # ------------------------------------------------------------ compactions

    def _compact_due(self, request: Request) -> None:
        """Compact the cache of a request that is due, if blocks come back by it.

        If no blocks are free for the tokens that stay, and its own cannot be written, it is tried
        again with the next token. With a KV connector, the prompt's blocks stay until they are
        saved.
        """
        rule, transfers = self._rule.of(request.params.kv_compression), self._transfers
        assert rule is not None, "no compaction is due"
        gain, kept = self._gain(request, rule, () if transfers is None else transfers.held)
        if gain < self.min_gain or self._compact_held(request, kept, gain):
            self._places[request] = rule.next_place(
                request.num_computed_tokens, request.num_prompt_tokens
            )

    def relieve(self, requests: list[Request]) -> bool:
        """Compact the cache, of those that wait for pressure, from which most blocks come back."""
        return self._relieve(requests)

    def _relieve(self, requests: Iterable[Request], *, worth: int | None = None) -> bool:
        """worth: leave a cache out unless one in so many of its blocks comes back."""
        if not self._rule.on_pressure:
            return False
        best: tuple[int, int, Request] | None = None
        for request in requests:
            rule = self._rule.of(request.params.kv_compression)
            decodes = request.num_tokens - request.num_computed_tokens == 1
            ends = request.num_tokens >= request.max_total_tokens
            if rule is None or not decodes or ends or not request.prompt_computed:
                continue
            if request.slot in self._planned:
                continue
            gain, kept = self._gain(request, rule)
            if worth is not None and gain * worth < len(request.tables[0]):
                continue
            if gain > 0 and (best is None or gain > best[0]):
                best = gain, kept, request
        return best is not None and self._compact(best[2], best[1], best[0])

    def _relieve_admission(self, requests: Iterable[Request], num_blocks: int) -> None:
        """Compact caches until `num_blocks` are free, before any row of the plan."""
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
    ) -> tuple[int, int]:
        """Return how many blocks a compaction would give back, and how many tokens would stay.

        transfers: blocks that KV transfers hold, one entry per reference, which is to be ignored.
        """
        kept = min(rule.kept_tokens(request.num_computed_tokens), request.num_kv_tokens)
        return self._kv.compaction_gain(request, kept, transfers), kept

    def _compact_held(self, request: Request, kept: int, gain: int) -> bool:
        if self._transfers is not None:
            self._transfers.hold_prompt(request)
        if self._compact(request, kept, gain):
            return True
        if self._transfers is not None:
            self._transfers.let_prompt_go(request)
        return False

    def _compact(self, request: Request, kept: int, gain: int) -> bool:
        compaction = self._kv.compact(request, kept, self._read)
        if compaction is None:
            return False
        self._planned[request.slot] = request, compaction, gain
        return True
