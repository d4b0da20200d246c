"""The scheduler: plans what each step computes, and processes its result."""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec

from ..cache.groups import ONE_GROUP, CacheGroup
from ..cache.kv_manager import KVCacheManager, NoKVCache, PrefixHits
from ..config import KVTransferConfig
from ..outputs import EngineStats, FinishReason, KVCompressionUsage
from ..protocols.executors import SchedulePolicy
from ..request import Request, Status, Update
from ..step import (
    NOTHING_IN_PROCESS,
    InProcess,
    SlotStart,
    StateCopy,
    StepPlan,
    StepResult,
    TableWrite,
    TokenLogprobs,
)
from .compression import CacheCompression, CompressionRule
from .guarded_connector import GuardedConnector
from .kv_transfers import KVTransfers, LoadDecision
from .limits import RequestLimits
from .policy_keys import PolicyKeys
from .queue import RequestQueue


@dataclass(slots=True)
class _PlanBuilder:
    """Rows of the plan that `schedule` is building, decode rows apart from prefill rows."""

    budget: int
    decodes: list[Request] = field(default_factory=list)
    prefills: list[Request] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    """[len(prefills)] tokens of each prefill row"""
    starts: list[SlotStart] = field(default_factory=list)
    table_writes: list[TableWrite] = field(default_factory=list)
    state_loads: list[StateCopy] = field(default_factory=list)
    state_saves: list[StateCopy] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """A planned step, kept until its result arrives."""

    rows: list[Request]
    epochs: list[int]
    """[num_rows] Epoch of each request; a later one means that it ended or was preempted."""
    first_positions: dict[int, int]
    """Row → first position computed, for requests with prompt logprobs."""
    ends: list[int]
    """[num_rows] tokens computed with this step; empty without a KV connector."""


class Scheduler:
    """Continuous batching over a paged KV cache, with any number of steps in flight.

    `schedule()` plans a step, `update()` processes its result. A step may be planned before the
    previous result is back: the number of tokens is known by then, only their ids are not. A
    running decode is scheduled on its pending token, whose id stays on the device.

    Running requests get their tokens first, in policy order; then waiting ones are admitted in
    policy order. When blocks run out, the last running request in that order loses its blocks and
    slot and is computed again later, so the first one always progresses.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        enable_chunked_prefill: bool,
        policy: SchedulePolicy,
        policy_name: str = "the schedule policy",
        long_prefill_token_threshold: int = 0,
        connector: GuardedConnector | None = None,
        transfer: KVTransferConfig | None = None,
        hash_key: bytes | None = None,
        groups: Sequence[CacheGroup] = ONE_GROUP,
        kv_compression: CompressionRule | None = None,
        num_snapshots: int | None = None,
    ) -> None:
        """transfer: the role of `connector`. hash_key: see `BlockHasher`. groups: layers that share
        a block table. kv_compression: None: caches stay whole. Not None only with one group
        without a window, and without a connector. num_snapshots: of states, if
        layers keep them; None: they keep none."""
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self._keys = PolicyKeys(policy, policy_name)
        self.kv = (
            KVCacheManager(
                num_blocks,
                block_size,
                enable_prefix_caching,
                hash_key,
                groups=groups,
                max_chunk=self._chunk(max_num_batched_tokens, max_num_batched_tokens),
                num_snapshots=num_snapshots,
            )
            if num_blocks
            else NoKVCache(block_size)
        )
        self.limits = RequestLimits(
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            num_blocks=self.kv.num_usable_blocks if num_blocks else None,
            block_size=block_size,
            groups=tuple(groups),
            max_chunk=self._chunk(max_num_batched_tokens, max_num_batched_tokens),
        )
        """Limits that admission has checked for every request. They shrink if blocks are lost."""
        self.transfers: KVTransfers | None = None
        self._fail_on_load = False
        if connector is not None:
            transfer = transfer or KVTransferConfig(kv_connector="")
            self._fail_on_load = transfer.kv_load_failure_policy == "fail"
            self.transfers = KVTransfers(
                connector,
                self.kv,
                loads=transfer.kv_role != "kv_producer",
                saves=transfer.kv_role != "kv_consumer",
            )
        self.requests: dict[str, Request] = {}
        """Every unfinished request by id."""
        self.running = RequestQueue()
        self.waiting = RequestQueue()
        self.loading = RequestQueue()
        """Requests that wait for a load of the KV connector."""
        self._arrivals = count()
        self._steps = count()
        self._free_slots = list(range(max_num_seqs))
        self._released: list[int] = []
        self._in_flight: dict[int, _Step] = {}
        self._failures: list[Update] = []
        self._stats = EngineStats(num_slots=max_num_seqs, kv_blocks_total=self.kv.num_usable_blocks)
        self._admission_reserve = num_blocks // 100
        self._compression: CacheCompression | None = None
        if kv_compression is not None:
            self._compression = CacheCompression(kv_compression, self.kv, self._stats)
        self._blocks_wanted = 0
        """Blocks that the first waiting request lacked when the last plan was made."""

    # ------------------------------------------------------------ requests in and out

    def add_requests(self, *requests: Request) -> None:
        """Queue requests that are within `limits`: all of them, or none if this raises.

        Raises RequestFailed if the policy fails on one.
        """
        ids = {request.request_id for request in requests}
        assert len(ids) == len(requests) and ids.isdisjoint(self.requests), f"repeated: {ids}"
        keys = []
        for index, request in enumerate(requests):
            reason = self.limits.rejection_reason(
                request.num_prompt_tokens, request.max_total_tokens
            )
            assert reason is None, reason
            keys.append(self._keys.of(request, alone=not self.requests and index == 0))
        for request, key in zip(requests, keys, strict=True):
            request.order = (*key, next(self._arrivals))
            self.requests[request.request_id] = request
            self.waiting.add(request)
            if request.leader is None:
                self._stats.prompt_tokens += request.num_prompt_tokens
            elif not self.kv.enable_prefix_caching:
                request.leader.private_salt = request.private_salt = request.leader.request_id

    def finish_request(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> Request | None:
        """End a request in any state. Return None if it is unknown or has ended already."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request, reason, stop_reason)
        return request

    def fail_all(self, error: str) -> list[Update]:
        """End every request after the device failed; drop steps in flight and cached content."""
        updates = self.take_failures()
        self._in_flight.clear()
        for request in list(self.requests.values()):
            self._fail(request, error, updates)
        if self.transfers is not None:
            self.transfers.abandon()
        self.kv.reset_prefix_cache()
        return updates

    def not_taken(self, plan: StepPlan) -> None:
        """Note that the executor raised instead of taking this plan, the last one: none of it has
        arrived. `fail_step` follows."""
        if plan.kv_metadata is not None:
            assert self.transfers is not None, "metadata without a KV connector"
            self.transfers.send_again(plan.kv_metadata)

    def fail_step(
        self, plan: StepPlan, error: str, dropped: Iterable[StepResult] = ()
    ) -> list[Update]:
        """End the requests of a step that failed as a whole; steps planned after it were not run.

        The worker has forgotten all slots. Running requests that were not in the step start again
        as preempted ones do, and the prefix cache is cleared: steps that were planned after the
        failed one may have registered blocks that were never filled.

        KV transfers continue: the worker half has been notified of those in the plans that were not
        run, and a report that the step should have brought comes with the next. Of `dropped`,
        results of steps that succeeded after it, only the reports of transfers are used.
        """
        step = self._in_flight[plan.step]
        self._in_flight.clear()
        updates = self.take_failures()
        for request, epoch in zip(step.rows, step.epochs, strict=True):
            if request.epoch == epoch:
                self._fail(request, error, updates)
        for request in reversed(self.running.requests[:]):
            self._preempt(request)
        self._released.clear()
        self.kv.forget_all()
        if self.transfers is not None:
            for result in dropped:
                self._take_transfers(result, updates)
            self.transfers.expect_report()
        return updates

    def take_failures(self) -> list[Update]:
        """Return updates that belong to no step, as `update` also does."""
        failures, self._failures = self._failures, []
        return failures

    # ------------------------------------------------------------ planning

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Return None if nothing can run before a result or request arrives."""
        builder = _PlanBuilder(self.max_num_batched_tokens)
        self._detach_connector()
        if self._schedule_running(builder):
            self._admit_waiting(builder)
        metadata = None
        if self.transfers is not None:
            metadata = self.transfers.metadata()
            if self._detach_connector():
                # The connector failed while this step was planned: requests need not wait for it.
                self._admit_waiting(builder)
            report_pending = self.transfers.take_pending_report()
            if metadata is not None or report_pending:
                return self._build_plan(builder, metadata)
        if not builder.decodes and not builder.prefills:
            return None
        return self._build_plan(builder, metadata)

    def _schedule_running(self, builder: _PlanBuilder) -> bool:
        """Schedule tokens for running requests. Return False if one had to be preempted.

        A victim is taken from the end of the list that is being walked, so it is never in this
        plan already.
        """
        block_size = self.kv.block_size
        decodes = builder.decodes
        budget = builder.budget
        num_running = len(self.running)
        if self._blocks_wanted:
            assert self._compression is not None, "set with KV compression"
            self._compression.relieve_admission(self.running.requests, self._blocks_wanted)
            self._blocks_wanted = 0
        for request in self.running.requests:
            if budget <= 0:
                break
            computed = request.num_computed_tokens
            num_tokens = request.num_tokens
            if num_tokens - computed == 1:
                if num_tokens >= request.max_total_tokens:
                    continue  # its last token is in flight
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
                chunk = self._chunk(num_tokens - computed, budget)
                if self.kv.snapshots is not None:
                    chunk = self._to_boundary(request, computed, chunk)
                if not self._extend_blocks(request, chunk, builder):
                    break
                self._add_prefill(builder, request, chunk)
                budget -= chunk
        builder.budget = budget
        return len(self.running) == num_running

    def _extend_blocks(self, request: Request, num_new_tokens: int, builder: _PlanBuilder) -> bool:
        """Allocate blocks for a request's next tokens, preempting the last requests if needed.

        Return False if the request itself was preempted.
        """
        self.kv.register(request)
        while (writes := self.kv.allocate(request, num_new_tokens)) is None:
            if self._relieve(request):
                continue
            victim = self.running.requests[-1]
            self._preempt(victim)
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
        running = self.running.requests
        return self._compression.relieve(running[running.index(request) :])

    def _chunk(self, num_tokens: int, budget: int) -> int:
        """Return how many of a prompt's tokens this step computes."""
        if self.long_prefill_token_threshold and self.enable_chunked_prefill:
            num_tokens = min(num_tokens, self.long_prefill_token_threshold)
        return min(num_tokens, budget)

    def _to_boundary(self, request: Request, computed: int, chunk: int) -> int:
        """Return how many of a chunk's tokens lead to the next states that are worth keeping: those
        that a request with the same tokens would start from, and those after what the request has
        in common with earlier ones."""
        if self.enable_chunked_prefill:
            for boundary in sorted((self._last_boundary(request), request.state_boundary)):
                if computed < boundary < computed + chunk:
                    return boundary - computed
        return chunk

    def _last_boundary(self, request: Request) -> int:
        """Return the tokens of the blocks that a request with the same tokens would not compute."""
        size = self.kv.block_size
        return (request.num_known_tokens - 1) // size * size

    def _save_states(self, builder: _PlanBuilder, request: Request) -> None:
        """Keep the states after a chunk that ends where `_to_boundary` says."""
        computed = request.num_computed_tokens
        if computed and computed in (self._last_boundary(request), request.state_boundary):
            row = self.kv.snapshot(request)
            if row is not None:
                builder.state_saves.append(StateCopy(request.slot, row))

    def _admit_waiting(self, builder: _PlanBuilder) -> None:
        """Admit waiting requests in order, until one finds no budget, slot or blocks."""
        admitted = []
        for request in self.waiting.requests:
            if builder.budget <= 0 or not self._free_slots:
                break
            if _waits_for_leader(request):
                continue
            hits = self.kv.find_hits(request)
            if self.transfers is not None:
                reserve = self._admission_reserve if len(self.running) else 0
                decision = self.transfers.try_load(request, hits, reserve)
                if decision is LoadDecision.NO_ROOM:
                    break
                if decision is LoadDecision.STARTED:
                    self.loading.add(request)
                    admitted.append(request)
                if decision is not LoadDecision.NOTHING:
                    continue
            if not self._admit(request, hits, builder):
                break
            admitted.append(request)
        for request in admitted:
            self.waiting.remove(request)

    def _admit(self, request: Request, hits: PrefixHits, builder: _PlanBuilder) -> bool:
        num_left = request.num_tokens - hits.num_blocks * self.kv.block_size
        # A preempted request may have outgrown one step's budget; it is chunked all the same.
        must_be_whole = (
            not self.enable_chunked_prefill and request.num_tokens <= self.max_num_batched_tokens
        )
        if must_be_whole and num_left > builder.budget:
            return False
        # Room for all its tokens, though only a chunk's blocks are taken now, and a reserve for
        # running requests: admitting a request that is soon preempted wastes work.
        reserve = self._admission_reserve if len(self.running) else 0
        if not self.kv.can_hold(request.num_tokens, hits, reserve):
            if self._compression is not None:
                missing = self.kv.blocks_for(request.num_tokens) - hits.num_blocks
                self._blocks_wanted = missing + reserve
            return False
        chunk = self._chunk(num_left, builder.budget)
        snapshots = self.kv.snapshots
        if snapshots is not None:
            request.state_boundary = hits.num_seen * self.kv.block_size
            chunk = self._to_boundary(request, request.num_tokens - num_left, chunk)
        request.slot = heapq.heappop(self._free_slots)
        self.kv.allocate(request, chunk, hits)
        builder.table_writes += self.kv.whole_tables(request)
        request.num_offered_blocks = hits.num_blocks
        if request.first_scheduled is None:
            request.first_scheduled = time.monotonic()
            request.num_cached_tokens = request.num_computed_tokens
            self.kv.count_lookup(
                request, max(0, request.num_cached_tokens - request.num_loaded_tokens)
            )
        request.status = Status.RUNNING
        if self._compression is not None:
            self._compression.admit(request)
        self.running.add(request)
        builder.starts.append(_slot_start(request))
        if snapshots is not None and hits.state is not None:
            builder.state_loads.append(StateCopy(request.slot, snapshots.use(hits.state)))
        self._add_prefill(builder, request, chunk)
        builder.budget -= chunk
        return True

    def _add_prefill(self, builder: _PlanBuilder, request: Request, chunk: int) -> None:
        builder.prefills.append(request)
        builder.chunks.append(chunk)
        request.num_computed_tokens += chunk
        self.kv.register(request)
        if self.kv.snapshots is not None:
            self._save_states(builder, request)
        if request.num_computed_tokens == request.num_tokens:
            request.num_tokens += 1

    def _build_plan(self, builder: _PlanBuilder, metadata: bytes | None = None) -> StepPlan:
        rows = builder.decodes + builder.prefills
        num_decodes = len(builder.decodes)
        first_positions = {
            num_decodes + i: request.num_computed_tokens - builder.chunks[i]
            for i, request in enumerate(builder.prefills)
            if request.params.prompt_logprobs is not None
        }
        step = next(self._steps)
        ends = [] if self.transfers is None else [r.num_computed_tokens for r in rows]
        self._in_flight[step] = _Step(rows, [r.epoch for r in rows], first_positions, ends)
        released, self._released = self._released, []
        if self.kv.snapshots is not None:
            self.kv.snapshots.commit()
        return StepPlan(
            step=step,
            slots=tuple([r.slot for r in rows]),
            num_tokens=(1,) * num_decodes + tuple(builder.chunks),
            samples=(True,) * num_decodes
            + tuple([r.num_pending_tokens > 0 for r in builder.prefills]),
            released=tuple(released),
            starts=tuple(builder.starts),
            table_writes=tuple(builder.table_writes),
            compactions=() if self._compression is None else self._compression.take(),
            state_loads=tuple(builder.state_loads),
            state_saves=tuple(builder.state_saves),
            kv_metadata=metadata,
        )

    def in_process(self, plan: StepPlan) -> InProcess:
        """Return what goes to the executor beside a plan, right after `schedule` has made it."""
        if not plan.starts:
            return NOTHING_IN_PROCESS
        grammars = {r.slot: r.grammar for r in self._in_flight[plan.step].rows}
        starting = (start.slot for start in plan.starts if start.grammar is not None)
        return InProcess({slot: g for slot in starting if (g := grammars[slot]) is not None})

    # ------------------------------------------------------------ results

    def update(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Process a step's result: append tokens, end finished requests.

        Rows of requests that have ended or were preempted since the plan was made are dropped, and
        so are a row's tokens after one that ends its request.
        """
        step = self._in_flight.pop(plan.step)
        updates = self.take_failures()
        self._take_transfers(result, updates)
        logprobs, failed, first_positions = result.logprobs, result.failed, step.first_positions
        transfers = self.transfers
        num_new = 0
        rows = zip(step.rows, step.epochs, result.rows(), strict=True)
        for row, (request, epoch, new) in enumerate(rows):
            if request.epoch != epoch:
                continue
            if failed and row in failed:
                self._fail(request, failed[row], updates)
                continue
            if transfers is not None:
                transfers.offer_save(request, step.ends[row])
            if request.pooling is not None:
                if plan.samples[row]:
                    self._end(request, "stop")
                    updates.append(Update(request, [], pooled=result.pooled[row], finished=True))
                continue
            update = Update(request, new)
            if first_positions and row in first_positions:
                update.prompt_logprobs = _new_prompt_logprobs(
                    request, first_positions[row], result.prompt_logprobs.get(row)
                )
            if new:
                token_id = new[0] if len(new) == 1 else self._take_all_but_last(request, new)
                request.output_token_ids.append(token_id)
                # Cheap conditions first: few tokens can be the last.
                if token_id in request.stop_ids or request.num_tokens >= request.max_total_tokens:
                    stop = request.stop_on(token_id)
                    if stop is not None:
                        self._end(request, *stop)
                        update.finished = True
                num_new += len(new)
                if logprobs and row in logprobs:
                    update.logprobs = logprobs[row][: len(new)]
            elif plan.samples[row]:
                self._fail(request, "the step brought no token for it", updates)
                continue
            elif update.prompt_logprobs is None:
                continue
            updates.append(update)
        self._stats.steps += 1
        self._stats.generation_tokens += num_new
        self._stats.late_preparations += result.late_preparations
        self._stats.kv_compaction_seconds += result.compaction_seconds
        return updates

    def _take_all_but_last(self, request: Request, new: list[int]) -> int:
        """Append a row's tokens up to the one before the last, and return the last.

        A token that ends the request is the last: those after it are removed from `new`.
        """
        # One token was pending; the KV of the others, but the last, is written, too.
        request.num_tokens += len(new) - 1
        request.num_computed_tokens += len(new) - 1
        outputs = request.output_token_ids
        for number, token_id in enumerate(new):
            outputs.append(token_id)
            if number == len(new) - 1 or request.stop_on(token_id) is not None:
                break
        del new[number + 1 :]
        return outputs.pop()

    def _detach_connector(self) -> bool:
        """Queue requests again whose load will never begin, if the KV connector has failed.

        Return whether it has failed since the last call.
        """
        if self.transfers is None or not self.transfers.take_failure():
            return False
        for request in self.transfers.withdraw():
            self._load_ended(request, complete=False, updates=self._failures)
        return True

    def _take_transfers(self, result: StepResult, updates: list[Update]) -> None:
        """Process a result's report of KV transfers: requests whose load has ended queue again, as
        the loaded blocks are now cached."""
        if result.kv_report is not None:
            assert self.transfers is not None, "a report without a KV connector"
            for request, complete in self.transfers.take_report(result.kv_report):
                self._load_ended(request, complete, updates)
        if result.kv_detached is not None:
            assert self.transfers is not None, "a failure without a KV connector"
            num_lost = self.transfers.num_lost_blocks
            for request in self.transfers.detach(result.kv_detached):
                self._load_ended(request, complete=False, updates=updates)
            if self.transfers.num_lost_blocks != num_lost:
                self._shrink_limits(self.transfers.num_lost_blocks, updates)

    def _shrink_limits(self, num_lost_blocks: int, updates: list[Update]) -> None:
        """Fail the requests that can never finish, now that blocks were lost."""
        num_blocks = self.kv.num_usable_blocks - num_lost_blocks
        self.limits = dataclasses.replace(self.limits, num_blocks=num_blocks)
        for request in list(self.requests.values()):
            reason = self.limits.rejection_reason(
                request.num_prompt_tokens, request.max_total_tokens
            )
            if reason is not None:
                self._fail(request, reason, updates)

    def _load_ended(self, request: Request, complete: bool, updates: list[Update]) -> None:
        if not complete and self._fail_on_load:
            failure = None if self.transfers is None else self.transfers.failure
            because = f": {failure}" if failure else ""
            self._fail(request, f"its KV could not be loaded{because}", updates)
            return
        self.loading.remove(request)
        request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
        self.waiting.add(request)

    # ------------------------------------------------------------ transitions

    def _preempt(self, request: Request) -> None:
        """Return a running request to the queue, to be computed again; drop results in flight."""
        self._leave_slot(request)
        self.kv.free(request)
        request.external_end = None
        request.status = Status.PREEMPTED
        request.epoch += 1
        request.num_computed_tokens = 0
        request.num_tokens = request.num_known_tokens
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        self.waiting.add(request)

    def _end(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        if request.status is Status.RUNNING:
            self._leave_slot(request)
        elif request.status is Status.LOADING:
            self.loading.remove(request)
        else:
            self.waiting.remove(request)
        request.finish_reason = reason
        request.stop_reason = stop_reason
        if request.compacted:
            request.compression_usage = KVCompressionUsage(
                request.num_kv_tokens, request.num_dropped_tokens, request.num_compactions
            )
        if self.transfers is not None:
            self.transfers.finish_request(request)
        self.kv.free(request)
        request.status = Status.FINISHED
        request.epoch += 1
        del self.requests[request.request_id]

    def _fail(self, request: Request, error: str, updates: list[Update]) -> None:
        self.kv.invalidate(request)
        self._end(request, "error")
        updates.append(Update(request, [], finished=True, error=error))

    def _leave_slot(self, request: Request) -> None:
        self.running.remove(request)
        if self._compression is not None:
            self._compression.withdraw(request.slot)
        heapq.heappush(self._free_slots, request.slot)
        self._released.append(request.slot)
        request.slot = -1

    # ------------------------------------------------------------ looking in

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for admission, first or after preemption, or for a load."""
        return len(self.waiting) + len(self.loading)

    @property
    def in_flight(self) -> int:
        """Number of planned steps without a result."""
        return len(self._in_flight)

    @property
    def num_steps(self) -> int:
        """Number of steps whose result has been processed."""
        return self._stats.steps

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a failure not yet returned."""
        return bool(self.requests or self._failures)

    @property
    def stats(self) -> EngineStats:
        """Return a snapshot."""
        return msgspec.structs.replace(
            self._stats,
            num_requests_running=self.num_running,
            num_requests_waiting=self.num_waiting,
            kv_blocks_used=self.kv.num_used_blocks,
            kv_cache_usage=self.kv.usage,
            prefix_cache_queries=self.kv.num_queried_tokens,
            prefix_cache_hits=self.kv.num_hit_tokens,
            **({} if self.transfers is None else self.transfers.counts),
        )

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks. Return False, and change nothing, while a request runs."""
        return self.kv.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Raise AssertionError if queues, slots and blocks contradict each other."""
        running, waiting = self.running.requests, self.waiting.requests
        loading = self.loading.requests
        for name, queue in (("running", running), ("waiting", waiting), ("loading", loading)):
            orders = [r.order for r in queue]
            assert orders == sorted(orders), f"the {name} requests are out of order"
        places = [*running, *waiting, *loading]
        queued = {r.request_id for r in places}
        assert len(queued) == len(places), "a request stands in two places"
        assert queued == set(self.requests), f"lost or left over: {queued ^ set(self.requests)}"
        slots = sorted([*self._free_slots, *(r.slot for r in running)])
        assert slots == list(range(self.max_num_seqs)), f"slots leaked or used twice: {slots}"
        for r in running:
            assert r.status is Status.RUNNING, f"{r.request_id} is {r.status}, but runs"
            assert r.num_known_tokens <= r.num_tokens <= r.max_total_tokens, (
                f"{r.request_id}: {r.num_known_tokens} known, {r.num_tokens} tokens, "
                f"at most {r.max_total_tokens}"
            )
            assert 0 < r.num_computed_tokens < r.num_tokens, (
                f"{r.request_id}: {r.num_computed_tokens} of {r.num_tokens} tokens computed"
            )
        for r in waiting:
            assert r.status in (Status.WAITING, Status.PREEMPTED), f"{r.request_id} is {r.status}"
        for r in loading:
            assert r.status is Status.LOADING, f"{r.request_id} is {r.status}, but loads"
        for r in [*waiting, *loading]:
            assert not r.tables and r.slot < 0, f"{r.request_id} waits, but holds blocks"
            assert r.num_computed_tokens == 0 and r.num_pending_tokens == 0, (
                f"{r.request_id} waits, but counts computed tokens"
            )
        if self.transfers is None:
            self.kv.check(running)
        else:
            self.transfers.check({r.request_id for r in loading})
            self.kv.check(running, self.transfers.held_blocks)


def _waits_for_leader(request: Request) -> bool:
    leader = request.leader
    return leader is not None and not leader.finished and not leader.prompt_computed


def _slot_start(request: Request) -> SlotStart:
    return SlotStart(
        slot=request.slot,
        request_id=request.request_id,
        token_ids=(*request.prompt_token_ids, *request.output_token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        params=request.params,
        seed=request.seed,
        stop_token_ids=tuple(sorted(request.stop_ids)),
        bad_words_token_ids=request.bad_words_token_ids,
        grammar=None if request.grammar is None else request.grammar.start,
        pooling=request.pooling,
        token_type_ids=request.token_type_ids,
    )


def _new_prompt_logprobs(
    request: Request, first_position: int, positions: list[TokenLogprobs] | None
) -> list[TokenLogprobs] | None:
    """Return the positions not published yet: a preempted prompt is computed more than once.

    Position p is about prompt token p + 1. The first `num_prompt_logprobs` have been published.
    """
    if positions is None:
        return None
    new = positions[max(0, request.num_prompt_logprobs - first_position) :]
    request.num_prompt_logprobs += len(new)
    return new or None
