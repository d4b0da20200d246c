"""Chooses the rows of a step: tokens for running requests, and waiting requests that begin."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..cache.kv_manager import KVCacheManager, PrefixHits
from ..request import Request
from ..step import StateCopy
from .allowances import Allowance
from .compression import CacheCompression
from .drafts import DraftBooks
from .kv_transfers import KVTransfers, LoadDecision
from .live_requests import LiveRequests
from .pipeline.lanes import Lanes
from .plan_builder import PlanBuilder
from .prefill_chunks import PrefillChunks
from .queues.decode_rows import DecodeRows, has_prompt_left


class RowPlanner:
    """Gives running requests their tokens and blocks in policy order, then admits waiting ones."""

    def __init__(
        self,
        requests: LiveRequests,
        kv: KVCacheManager,
        chunks: PrefillChunks,
        *,
        max_num_batched_tokens: int,
        admission_reserve: int,
        transfers: KVTransfers | None,
        compression: CacheCompression | None,
        allowances: Sequence[Allowance] = (),
        drafts: DraftBooks | None = None,
        lanes: Lanes | None = None,
        decoding: DecodeRows | None = None,
    ) -> None:
        """admission_reserve: blocks that stay free for running requests when another is
        admitted. allowances: what a request must have, besides slot and blocks. lanes: with
        stages. decoding: where a decoding request gets one token with every plan."""
        self._requests = requests
        self._kv = kv
        self._chunks = chunks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._admission_reserve = admission_reserve
        self._transfers = transfers
        self._compression = compression
        self._allowances = allowances
        self._drafts = drafts
        self._lanes = lanes
        self._decoding = decoding
        self._blocks_wanted = 0
        """Blocks that the first waiting request lacked when the last plan was made."""
        self._promised: int | None = None
        """Blocks that running requests are likely to take, once a plan has asked for them."""

    def schedule_running(self, builder: PlanBuilder) -> bool:
        """Schedule tokens for running requests. Return False if one had to be preempted."""
        running, decoding = self._requests.running.requests, self._decoding
        num_running = len(running)
        if builder.prompts_alone:
            self._schedule(self.running_prompts(), builder)
        elif decoding is None:
            self._schedule(running, builder)
        else:
            left = decoding.begin_plan()
            if self._add_decodes(left, decoding, builder):
                self._schedule(left, builder)
            else:
                decoding.count_tokens()
                self._schedule(running, builder)
                decoding.settle(builder.decodes)
        return len(running) == num_running

    def running_prompts(self) -> list[Request]:
        """Return the running requests with prompts left to compute, in policy order."""
        if self._decoding is not None:
            return self._decoding.prompts()
        return [request for request in self._requests.running if has_prompt_left(request)]

    def _add_decodes(self, left: list[Request], decoding: DecodeRows, builder: PlanBuilder) -> bool:
        """Schedule the token of every decoding request. Return False, with nothing done, if that
        must be decided request by request: budget or blocks are short, or one of `left`, the other
        requests that need tokens, comes first."""
        if not len(decoding):
            return True
        columns = decoding.columns()
        rows = columns.rows
        if len(rows) > builder.budget or (left and left[0].order < rows[-1].order):
            return False
        needing = decoding.needing_blocks()
        if needing:
            writes = self._kv.append_blocks(needing)
            if writes is None:
                return False
            builder.table_writes += writes
        decoding.give_tokens()
        builder.add_decodes(columns)
        return True

    def _schedule(self, requests: list[Request], builder: PlanBuilder) -> None:
        """Schedule tokens for these of the running requests, in policy order.

        A victim of preemption is taken from the end of the running requests. So it is never in this
        plan already; if it is in the list that is being walked, it is in the rest of it.
        """
        block_size = self._kv.block_size
        decodes = builder.decodes
        budget = builder.budget
        spare = budget - len(self._requests.running)
        """Tokens for drafts: each running request may have one without."""
        if self._blocks_wanted:
            assert self._compression is not None, "set with KV compression"
            self._compression.relieve_admission(
                self._requests.running.requests, self._blocks_wanted
            )
            self._blocks_wanted = 0
        for request in requests:
            if budget <= 0 or request.slot < 0:
                break  # Preempted, as are all that follow.
            computed = request.num_computed_tokens
            num_tokens = request.num_tokens
            if num_tokens - computed == 1:
                if num_tokens >= request.max_total_tokens:
                    continue  # its last token is in flight
                if self._lanes is not None and not self._lanes.takes(request):
                    continue
                if request.num_proposed and (drafts := self._add_drafts(request, spare, builder)):
                    spare -= drafts
                    budget -= 1 + drafts
                    continue
                if computed >= request.compact_at:
                    self._compress(request)
                in_cache = computed - request.num_dropped_tokens
                if in_cache % block_size == 0 and not self._extend_blocks(request, 1, builder):
                    break
                request.num_computed_tokens = num_tokens
                request.num_tokens = num_tokens + 1
                decodes.append(request)
                budget -= 1
            else:
                if computed >= request.compact_at:
                    self._compress(request)
                chunk = self._chunks.length(request, computed, budget)
                if not self._extend_blocks(request, chunk, builder):
                    break
                self._add_prefill(builder, request, chunk)
                budget -= chunk
                spare -= chunk - 1
        builder.budget = budget

    def _add_drafts(self, request: Request, spare: int, builder: PlanBuilder) -> int:
        """Plan a row with drafts, and return their number; 0, with nothing done: the request gets
        none, or there are no blocks for them."""
        assert self._drafts is not None, "proposed by a speculator"
        num_drafts = self._drafts.wanted(request, spare)
        if not num_drafts:
            return 0
        self._kv.register(request)
        writes = self._kv.allocate(request, 1 + num_drafts)
        if writes is None:
            return 0
        builder.table_writes += writes
        builder.drafted.append(request)
        builder.drafts.append(num_drafts)
        request.num_computed_tokens += 1 + num_drafts
        request.num_tokens += 1 + num_drafts
        request.num_unverified_tokens += num_drafts
        return num_drafts

    def _extend_blocks(self, request: Request, num_new_tokens: int, builder: PlanBuilder) -> bool:
        """Allocate blocks for a request's next tokens, preempting the last requests if needed.

        Return False if the request itself was preempted.
        """
        self._kv.register(request)
        while (writes := self._kv.allocate(request, num_new_tokens)) is None:
            if self._relieve(request):
                continue
            victim = self._requests.running.requests[-1]
            self._requests.preempt(victim)
            if victim is request:
                return False
        builder.table_writes += writes
        return True

    def _compress(self, request: Request) -> None:
        """Compact a request's cache, which is due, before its row is planned."""
        assert self._compression is not None, "no request is due"
        self._compression.compact_due(request)

    def _relieve(self, request: Request) -> bool:
        """Compact one cache because blocks have run out for this request's tokens. Return False if
        none can be."""
        if self._compression is None:
            return False
        running = self._requests.running.requests
        return self._compression.relieve(running[running.index(request) :])

    def admit_waiting(self, builder: PlanBuilder) -> None:
        """Admit waiting requests in order, until one finds no budget, slot or blocks."""
        admitted = []
        for allowance in self._allowances:
            allowance.begin_plan()
        self._promised = None
        for request in self._requests.waiting.requests:
            if builder.budget <= 0 or not self._requests.has_free_slot:
                break
            if _waits_for_leader(request):
                continue
            hits = self._kv.find_hits(request)
            if self._transfers is not None:
                reserve = self._admission_reserve if len(self._requests.running) else 0
                decision = self._transfers.try_load(request, hits, reserve)
                if decision is LoadDecision.NO_ROOM:
                    self._want_blocks(request, hits, reserve)
                    break
                if decision is LoadDecision.STARTED:
                    self._requests.loading.add(request)
                    admitted.append(request)
                if decision is not LoadDecision.NOTHING:
                    continue
            if not self._admit(request, hits, builder):
                break
            admitted.append(request)
        for request in admitted:
            self._requests.waiting.remove(request)

    def _admit(self, request: Request, hits: PrefixHits, builder: PlanBuilder) -> bool:
        num_left = request.num_tokens - hits.num_blocks * self._kv.block_size
        # A preempted request may have outgrown one step's budget; it is chunked all the same.
        must_be_whole = (
            not self._chunks.chunked and request.num_tokens <= self._max_num_batched_tokens
        )
        if must_be_whole and num_left > builder.budget:
            return False
        if builder.prefills and builder.budget < num_left <= builder.longest_whole:
            return False
        # Room for all its tokens, though only a chunk's blocks are taken now, and a reserve for
        # running requests: admitting a request that is soon preempted wastes work.
        reserve = self._admission_reserve if len(self._requests.running) else 0
        for allowance in self._allowances:
            if (cost := allowance.cost(request)) is None:
                return False
            reserve += cost
        num_computed, most = request.num_tokens - num_left, request.num_tokens
        if self._compression is not None:
            most = self._compression.most_tokens(request, hits.num_blocks)
            if self._promised is None:
                self._promised = self._compression.promised(self._requests.running.requests)
            reserve += self._promised
            self._compression.admit(request, num_computed)
        if not self._kv.can_hold(most, hits, reserve):
            self._want_blocks(request, hits, reserve)
            return False
        snapshots = self._kv.snapshots
        if snapshots is not None:
            request.state_boundary = hits.num_seen * self._kv.block_size
        chunk = self._chunks.length(request, num_computed, builder.budget)
        self._requests.run(request)
        self._kv.allocate(request, chunk, hits)
        if self._promised is not None:
            self._promised += self._kv.blocks_for(most) - len(request.tables[0])
        builder.table_writes += self._kv.whole_tables(request)
        self._requests.count_restart(request)
        for allowance in self._allowances:
            granted = allowance.take(request)
            builder.table_writes += granted.table_writes
            builder.encode += granted.encode
        if self._transfers is not None:
            request.num_offered_blocks = self._transfers.num_stored(request, hits.num_blocks)
        if request.first_scheduled is None:
            request.first_scheduled = time.monotonic()
            request.num_cached_tokens = request.num_computed_tokens
            self._kv.count_lookup(
                request, max(0, request.num_cached_tokens - request.num_loaded_tokens)
            )
        builder.start(request)
        if snapshots is not None and hits.state is not None:
            builder.state_loads.append(StateCopy(request.slot, snapshots.use(hits.state)))
        self._add_prefill(builder, request, chunk)
        builder.budget -= chunk
        return True

    def num_left(self, request: Request) -> int:
        """Return the tokens that a waiting request has to compute; 0: it cannot be admitted now."""
        if not self._requests.has_free_slot or _waits_for_leader(request):
            return 0
        return request.num_tokens - self._kv.find_hits(request).num_blocks * self._kv.block_size

    def _want_blocks(self, request: Request, hits: PrefixHits, reserve: int) -> None:
        """Let caches be compacted for the first waiting request before the next plan's rows."""
        if self._compression is not None:
            missing = self._kv.blocks_for(request.num_tokens) - hits.num_blocks
            self._blocks_wanted = missing + reserve

    def _add_prefill(self, builder: PlanBuilder, request: Request, chunk: int) -> None:
        builder.add_prefill(request, chunk)
        request.num_computed_tokens += chunk
        self._kv.register(request)
        if self._kv.snapshots is not None and self._chunks.ends_at_boundary(request):
            row = self._kv.snapshot(request)
            if row is not None:
                builder.state_saves.append(StateCopy(request.slot, row))
        if request.num_computed_tokens == request.num_tokens:
            request.num_tokens += 1


def _waits_for_leader(request: Request) -> bool:
    leader = request.leader
    return leader is not None and not leader.finished and not leader.prompt_computed
