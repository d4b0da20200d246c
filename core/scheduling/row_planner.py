"""Chooses a step's rows: running requests' tokens, then admissions."""

from __future__ import annotations

import time

from ..cache.kv_manager import KVCacheManager, PrefixHits
from ..request import Request
from ..sampling_params import OutputKind
from .live_requests import LiveRequests
from .parts.part import Readiness
from .parts.part_set import SchedulerParts
from .plan_builder import PlanBuilder
from .prefill_chunks import PrefillChunks
from .queues.decode_rows import DecodeRows, has_prompt_left


class RowPlanner:
    def __init__(
        self,
        requests: LiveRequests,
        kv: KVCacheManager,
        chunks: PrefillChunks,
        *,
        max_num_batched_tokens: int,
        admission_reserve: int,
        parts: SchedulerParts,
        decoding: DecodeRows | None,
    ) -> None:
        """admission_reserve: blocks kept free for running requests. decoding: if decoding requests
        get one token with every plan, or with those in which no part decides otherwise.
        """
        self._requests = requests
        self._kv = kv
        self._chunks = chunks
        self._max_num_batched_tokens = max_num_batched_tokens
        self._admission_reserve = admission_reserve
        self._parts = parts
        self._decoding = decoding

    def schedule_running(self, builder: PlanBuilder) -> bool:
        """Schedule running requests; False if one was preempted."""
        running, decoding = self._requests.running.requests, self._decoding
        num_running = len(running)
        if builder.prompts_alone:
            self._schedule(self.running_prompts(), builder)
        elif decoding is None:
            self._schedule(running, builder)
        else:
            left = decoding.begin_plan()
            decided = any([decides() for decides in self._parts.decides])
            if not decided and self._add_decodes(left, decoding, builder):
                self._schedule(left, builder)
            else:
                decoding.count_tokens()
                self._schedule(running, builder)
                decoding.settle(builder.decodes)
        return len(running) == num_running

    def running_prompts(self) -> list[Request]:
        if self._decoding is not None:
            return self._decoding.prompts()
        return [request for request in self._requests.running if has_prompt_left(request)]

    def has_streams(self) -> bool:
        """Return whether a running request's tokens are sent while it decodes."""
        return any(
            request.params.output_kind is not OutputKind.FINAL_ONLY and not has_prompt_left(request)
            for request in self._requests.running.requests
        )

    def _add_decodes(self, left: list[Request], decoding: DecodeRows, builder: PlanBuilder) -> bool:
        """Schedule every decoding request's token. Return False, unchanged, if requests must be
        decided one by one: budget or blocks are short, or one of `left` precedes.
        """
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
        """Schedule tokens for running requests, in policy order.

        Victims of preemption are taken from the end, so they are never in this plan already.
        """
        block_size, parts = self._kv.block_size, self._parts
        decodes = builder.decodes
        budget = builder.budget
        spare = budget - len(self._requests.running)
        """Tokens for drafts, after one per running request."""
        for eligible in parts.eligible:
            requests = eligible(requests)
        for request in requests:
            if budget <= 0 or request.slot < 0:
                break  # Preempted, as are all that follow.
            computed = request.num_computed_tokens
            num_tokens = request.num_tokens
            if num_tokens - computed == 1:
                if num_tokens >= request.max_total_tokens:
                    continue  # its last token is in flight
                if computed >= request.look_at:
                    count = 1
                    for decode_tokens in parts.decode_tokens:
                        count = decode_tokens(request, count, spare)
                    parts.look_again(request)
                    if not count:
                        continue
                    if count > 1 and self._add_drafts(request, count - 1, builder):
                        spare -= count - 1
                        budget -= count
                        continue
                in_cache = computed - request.num_dropped_tokens
                if in_cache % block_size == 0 and not self._extend_blocks(request, 1, builder):
                    break
                request.num_computed_tokens = num_tokens
                request.num_tokens = num_tokens + 1
                decodes.append(request)
                budget -= 1
            else:
                chunk = self._chunk(request, computed, budget)
                if not chunk:
                    continue
                if not self._extend_blocks(request, chunk, builder):
                    break
                self._add_prefill(builder, request, chunk)
                budget -= chunk
                spare -= chunk - 1
        builder.budget = budget

    def _chunk(self, request: Request, computed: int, budget: int) -> int:
        chunk = self._chunks.length(request, computed, budget)
        if computed + chunk > request.look_at:
            for chunk_tokens in self._parts.chunk_tokens:
                chunk = chunk_tokens(request, chunk)
            self._parts.look_again(request)
        return chunk

    def _add_drafts(self, request: Request, num_drafts: int, builder: PlanBuilder) -> bool:
        """Plan a row with drafts; False, unchanged, without blocks."""
        self._kv.register(request)
        writes = self._kv.allocate(request, 1 + num_drafts)
        if writes is None:
            return False
        builder.table_writes += writes
        builder.drafted.append(request)
        builder.drafts.append(num_drafts)
        request.num_computed_tokens += 1 + num_drafts
        request.num_tokens += 1 + num_drafts
        request.num_unverified_tokens += num_drafts
        return True

    def _extend_blocks(self, request: Request, num_new_tokens: int, builder: PlanBuilder) -> bool:
        """Allocate blocks for the next tokens, preempting last requests; False if the request
        itself was preempted.
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

    def _relieve(self, request: Request) -> bool:
        """Let parts free blocks; return whether one did."""
        if not self._parts.relieve:
            return False
        running = self._requests.running.requests
        rest = running[running.index(request) :]
        return any(relieve(rest) for relieve in self._parts.relieve)

    def admit_waiting(self, builder: PlanBuilder) -> None:
        """Admit waiting requests in order, while budget, slots and blocks last."""
        admitted = []
        for request in self._requests.waiting.requests:
            if builder.budget <= 0 or not self._requests.has_free_slot:
                break
            if _waits_for_leader(request):
                continue
            hits = self._kv.find_hits(request)
            if self._parts.readiness:
                readiness = self._readiness(request, hits)
                if readiness is Readiness.NO_ROOM:
                    break
                if readiness is Readiness.LOADING:
                    self._requests.wait_for_part(request)
                    admitted.append(request)
                if readiness is not Readiness.READY:
                    continue
            if not self._admit(request, hits, builder):
                break
            admitted.append(request)
        for request in admitted:
            self._requests.waiting.remove(request)

    def _readiness(self, request: Request, hits: PrefixHits) -> Readiness:
        """Return the first part's reason to wait, or READY."""
        reserve = self._reserve
        for readiness in self._parts.readiness:
            answer: Readiness = readiness(request, hits, reserve)
            if answer is Readiness.NO_ROOM:
                self._no_room(request, hits, reserve)
            if answer is not Readiness.READY:
                return answer
        return Readiness.READY

    @property
    def _reserve(self) -> int:
        return self._admission_reserve if len(self._requests.running) else 0

    def _no_room(self, request: Request, hits: PrefixHits, reserve: int) -> None:
        for no_room in self._parts.no_room:
            no_room(request, hits, reserve)

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
        reserve = self._reserve
        for cost in self._parts.cost:
            if (num_blocks := cost(request, hits)) is None:
                return False
            reserve += num_blocks
        if not self._kv.can_hold(request.num_tokens, hits, reserve):
            self._no_room(request, hits, reserve)
            return False
        self._requests.run(request)
        self._kv.allocate(request, 0, hits)
        for enter in self._parts.enter:
            enter(request, hits)
        self._parts.look_again(request)
        chunk = self._chunk(request, request.num_computed_tokens, builder.budget)
        self._kv.allocate(request, chunk)
        builder.table_writes += self._kv.whole_tables(request)
        self._requests.count_restart(request)
        if request.first_scheduled is None:
            request.first_scheduled = time.monotonic()
            request.num_cached_tokens = request.num_computed_tokens
            self._kv.count_lookup(
                request, max(0, request.num_cached_tokens - request.num_loaded_tokens)
            )
        for admit in self._parts.admit:
            admit(request, hits, builder)
        builder.start(request, self._parts.start_part)
        self._add_prefill(builder, request, chunk)
        builder.budget -= chunk
        return True

    def num_left(self, request: Request) -> int:
        """Return a waiting request's tokens to compute; 0: not admissible now."""
        if not self._requests.has_free_slot or _waits_for_leader(request):
            return 0
        return request.num_tokens - self._kv.find_hits(request).num_blocks * self._kv.block_size

    def _add_prefill(self, builder: PlanBuilder, request: Request, chunk: int) -> None:
        builder.add_prefill(request, chunk)
        request.num_computed_tokens += chunk
        self._kv.register(request)
        for chunk_planned in self._parts.chunk_planned:
            chunk_planned(request)
        if request.num_computed_tokens == request.num_tokens:
            request.num_tokens += 1


def _waits_for_leader(request: Request) -> bool:
    leader = request.leader
    return leader is not None and not leader.finished and not leader.prompt_computed
