"""The scheduler: plans what each step computes, and processes its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import count

import msgspec

from ..cache.groups import ONE_GROUP, CacheGroup
from ..cache.kv_manager import KVCacheManager, NoKVCache
from ..config import KVTransferConfig
from ..outputs import EngineStats, FinishReason
from ..protocols.executors import SchedulePolicy
from ..request import Request, Update
from ..step import NOTHING_IN_PROCESS, InProcess, StepPlan, StepResult
from .allowances import Allowance
from .compression import CacheCompression, CompressionRule
from .drafts import DraftBooks
from .guarded_connector import GuardedConnector
from .kv_transfers import KVTransfers
from .limits import RequestLimits
from .live_requests import LiveRequests
from .pacing.plan_timing import StepPace
from .pacing.step_sizes import StepSizes
from .pipeline.lanes import Lanes
from .plan_builder import PlanBuilder, PlannedStep
from .policy_keys import PolicyKeys
from .prefill_chunks import PrefillChunks
from .queues.decode_rows import DecodeRows
from .row_planner import RowPlanner
from .source_allowance import SourceAllowance


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
        max_source_tokens: int = 0,
        num_drafts: int = 0,
        num_stages: int = 1,
        ttft_target: float = 0.0,
    ) -> None:
        """transfer: the role of `connector`. hash_key: see `BlockHasher`. groups: layers that share
        a block table. kv_compression: None: caches stay whole. Not None only with one group
        that keeps all tokens. num_snapshots: of states, if layers keep them; None: they keep none.
        max_source_tokens: of an encoder-decoder model, without a connector and KV compression; 0:
        the model has no encoder. num_drafts: of a row, at most; not 0 only without a connector, KV
        compression, states and an encoder. num_stages: that a step passes through; not 1 only
        without drafts and a connector. ttft_target: see `StepSizes`; without effect with drafts,
        stages or a connector."""
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._keys = PolicyKeys(policy, policy_name)
        chunks = PrefillChunks(
            chunked=enable_chunked_prefill,
            longest=long_prefill_token_threshold,
            block_size=block_size,
            ends_at_states=bool(num_blocks and num_snapshots),
        )
        self.sizes = StepSizes(
            max_num_batched_tokens,
            chunked=enable_chunked_prefill,
            ttft_target=ttft_target if num_stages == 1 and connector is None else 0.0,
        )
        max_chunk = chunks.most(max_num_batched_tokens)
        self.kv = (
            KVCacheManager(
                num_blocks,
                block_size,
                enable_prefix_caching,
                hash_key,
                groups=groups,
                max_chunk=max_chunk,
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
            max_chunk=max_chunk,
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
        self._failures: list[Update] = []
        self._stats = EngineStats(num_slots=max_num_seqs, kv_blocks_total=self.kv.num_usable_blocks)
        self._compression: CacheCompression | None = None
        if kv_compression is not None:
            self._compression = CacheCompression(
                kv_compression, self.kv, self._stats, self.transfers
            )
        allowances: list[Allowance] = []
        if max_source_tokens:
            most = max(max_source_tokens, max_num_batched_tokens)
            allowances.append(SourceAllowance(self.kv, len(groups), most))
        self._drafts = DraftBooks(num_drafts, self.kv) if num_drafts else None
        self._lanes = Lanes(num_stages) if num_stages > 1 else None
        steady = num_blocks and not (num_drafts or kv_compression or self._lanes)
        # A connector may look at the requests with each result.
        decoding = DecodeRows(block_size, counts_late=connector is None) if steady else None
        self.requests = LiveRequests(
            max_num_seqs,
            self.kv,
            self._stats,
            transfers=self.transfers,
            compression=self._compression,
            allowances=allowances,
            drafts=self._drafts,
            lanes=self._lanes,
            decoding=decoding,
        )
        self._rows = RowPlanner(
            self.requests,
            self.kv,
            chunks,
            max_num_batched_tokens=max_num_batched_tokens,
            admission_reserve=num_blocks // 100,
            transfers=self.transfers,
            compression=self._compression,
            allowances=allowances,
            drafts=self._drafts,
            lanes=self._lanes,
            decoding=decoding,
        )
        self._steps = count()
        self._in_flight: dict[int, PlannedStep] = {}

    # ------------------------------------------------------------ requests in and out

    def add_requests(self, *requests: Request) -> None:
        """Queue requests that are within `limits`: all of them, or none if this raises.

        Raises RequestFailed if the policy fails on one.
        """
        ids = {request.request_id for request in requests}
        assert len(ids) == len(requests) and ids.isdisjoint(self.requests.by_id), f"repeated: {ids}"
        keys = []
        for index, request in enumerate(requests):
            reason = self.limits.rejection_reason(
                request.num_prompt_tokens, request.max_total_tokens
            )
            assert reason is None, reason
            keys.append(self._keys.of(request, alone=not self.requests.by_id and index == 0))
        for request, key in zip(requests, keys, strict=True):
            self.requests.add(request, key)
            if request.leader is None:
                self._stats.prompt_tokens += request.num_prompt_tokens
            elif not self.kv.enable_prefix_caching:
                request.leader.private_salt = request.private_salt = request.leader.request_id

    def finish_request(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> Request | None:
        """End a request in any state. Return None if it is unknown or has ended already."""
        request = self.requests.by_id.get(request_id)
        if request is not None:
            self.requests.end(request, reason, stop_reason)
        return request

    def fail_all(self, error: str) -> list[Update]:
        """End every request after the device failed; drop steps in flight and cached content."""
        updates = self.take_failures()
        self._forget_steps()
        for request in list(self.requests.by_id.values()):
            updates.append(self.requests.fail(request, error))
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
        self._forget_steps()
        updates = self.take_failures()
        for request, epoch in zip(step.rows, step.epochs, strict=True):
            if request.epoch == epoch:
                updates.append(self.requests.fail(request, error))
        for request in reversed(self.requests.running.requests[:]):
            self.requests.preempt(request)
        self.requests.take_released()  # The worker has forgotten them.
        self.kv.forget_all()
        if self.transfers is not None:
            for result in dropped:
                self._take_transfers(result, updates)
            self.transfers.expect_report()
        return updates

    def _forget_steps(self) -> None:
        self._in_flight.clear()
        if self._lanes is not None:
            self._lanes.forget_steps()

    def take_failures(self) -> list[Update]:
        """Return updates that belong to no step, as `update` also does."""
        failures, self._failures = self._failures, []
        return failures

    # ------------------------------------------------------------ planning

    def schedule(self, pace: StepPace | None = None) -> StepPlan | None:
        """Plan the next step. Return None if nothing can run before a result or request arrives.

        pace: the device's, by which steps with prompts are kept short (`StepSizes`); None: they
        have up to max_num_batched_tokens.
        """
        self.kv.register_pending()
        if self._lanes is None:
            return self._schedule(pace)
        requests = self.requests
        admits = requests.has_free_slot and bool(requests.waiting.requests)
        for _ in self._lanes.turns(requests.running.requests, admits):
            if (plan := self._schedule(pace)) is not None:
                return plan
        return None

    def _schedule(self, pace: StepPace | None) -> StepPlan | None:
        """Plan a step; with stages, of the lane whose turn it is."""
        pace = pace if self._drafts is None else None
        size = self.sizes.next_size(
            pace,
            len(self.requests.running),
            [] if pace is None else self._rows.running_prompts(),
            self.requests.waiting.requests,
            self._rows.num_left,
        )
        builder = PlanBuilder(*size)
        self._detach_connector()
        if self._rows.schedule_running(builder):
            self._rows.admit_waiting(builder)
        if builder.prompts_alone and not builder.has_rows:
            # No prompt found blocks: decode rows need not wait.
            self.sizes.end_pause()
            builder.prompts_alone = False
            self._rows.schedule_running(builder)
        metadata = None
        if self.transfers is not None:
            metadata = self.transfers.metadata()
            if self._detach_connector():
                # The connector failed while this step was planned: requests need not wait for it.
                self._rows.admit_waiting(builder)
            report_pending = self.transfers.take_pending_report()
            if metadata is not None or report_pending:
                return self._build_plan(builder, metadata)
        if not builder.has_rows:
            return None
        return self._build_plan(builder, metadata)

    def _build_plan(self, builder: PlanBuilder, metadata: bytes | None = None) -> StepPlan:
        step = next(self._steps)
        planned = builder.planned(with_ends=self.transfers is not None)
        self._in_flight[step] = planned
        if self.kv.snapshots is not None:
            self.kv.snapshots.commit()
        if self._lanes is not None:
            prompts = [request for request in builder.prefills if request.num_pending_tokens]
            self._lanes.planned(step, builder.decodes, [*builder.decodes, *prompts])
        return builder.plan(
            step,
            planned,
            released=self.requests.take_released(),
            compactions=() if self._compression is None else self._compression.take(),
            rejections=() if self._drafts is None else self._drafts.take_rejections(),
            kv_metadata=metadata,
        )

    def submitted(self) -> None:
        """Do what can wait until the plan is on its way, while the device computes. Without this
        call, the next `schedule` does it."""
        self.kv.register_pending()

    def in_process(self, plan: StepPlan) -> InProcess:
        """Return what goes to the executor beside a plan, right after `schedule` has made it."""
        starting = [start.slot for start in plan.starts if start.grammar is not None]
        if not starting:
            return NOTHING_IN_PROCESS
        grammars = {r.slot: r.grammar for r in self._in_flight[plan.step].rows}
        return InProcess({slot: g for slot in starting if (g := grammars[slot]) is not None})

    # ------------------------------------------------------------ results

    def update(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Process a step's result: append tokens, end finished requests.

        Rows of requests that have ended or were preempted since the plan was made are dropped, and
        so are a row's tokens after one that ends its request.
        """
        step = self._in_flight.pop(plan.step)
        if self._lanes is not None:
            self._lanes.ended(plan.step)
        updates = self.take_failures()
        self._take_transfers(result, updates)
        logprobs, failed, first_positions = result.logprobs, result.failed, step.first_positions
        transfers, drafts = self.transfers, self._drafts
        num_new = 0
        rows = zip(step.rows, step.epochs, result.rows(), strict=True)
        for row, (request, epoch, new) in enumerate(rows):
            if request.epoch != epoch:
                continue
            if failed and row in failed:
                updates.append(
                    self.requests.fail(request, failed[row], result.failed_params.get(row))
                )
                continue
            num_tokens = len(new)
            if drafts is not None:
                drafts.settle(request, row, plan, result, num_tokens)
            if transfers is not None:
                transfers.offer_save(request, step.ends[row])
            if request.pooling is not None:
                if plan.samples[row]:
                    self.requests.end(request, "stop")
                    updates.append(Update(request, [], pooled=result.pooled[row], finished=True))
                continue
            update = Update(request, new)
            if first_positions and row in first_positions:
                update.prompt_logprobs = request.new_prompt_logprobs(
                    first_positions[row], result.prompt_logprobs.get(row)
                )
            if num_tokens:
                outputs = request.output_token_ids
                if num_tokens == 1:
                    token_id = new[0]
                    num_new += 1
                else:
                    token_id = request.append_all_but_last(new)
                    num_new += len(new)
                outputs.append(token_id)
                # Cheap conditions first: few tokens can be the last.
                if token_id in request.stop_ids or len(outputs) >= request.max_tokens:
                    stop = request.stop_on(token_id)
                    if stop is not None:
                        self.requests.end(request, *stop)
                        update.finished = True
                if drafts is not None:
                    drafts.count(row, result, min(num_tokens - 1, len(new)))
                if logprobs and row in logprobs:
                    update.logprobs = logprobs[row][: len(new)]
            elif plan.samples[row]:
                updates.append(self.requests.fail(request, "the step brought no token for it"))
                continue
            elif update.prompt_logprobs is None:
                continue
            updates.append(update)
        self._stats.steps += 1
        self._stats.generation_tokens += num_new
        self._stats.late_preparations += result.late_preparations
        self._stats.graph_recording_failures += result.graph_recording_failures
        self._stats.kv_compaction_seconds += result.compaction_seconds
        return updates

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
        for request in list(self.requests.by_id.values()):
            reason = self.limits.rejection_reason(
                request.num_prompt_tokens, request.max_total_tokens
            )
            if reason is not None:
                updates.append(self.requests.fail(request, reason))

    def _load_ended(self, request: Request, complete: bool, updates: list[Update]) -> None:
        if not complete and self._fail_on_load:
            failure = None if self.transfers is None else self.transfers.failure
            because = f": {failure}" if failure else ""
            updates.append(self.requests.fail(request, f"its KV could not be loaded{because}"))
            return
        self.requests.wait_again(request)

    # ------------------------------------------------------------ looking in

    @property
    def num_running(self) -> int:
        return len(self.requests.running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for admission, first or after preemption, or for a load."""
        return len(self.requests.waiting) + len(self.requests.loading)

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
        return bool(self.requests.by_id or self._failures)

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
            **({} if self._drafts is None else self._drafts.counts),
        )

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks. Return False, and change nothing, while a request runs."""
        return self.kv.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Raise AssertionError if queues, slots and blocks contradict each other."""
        self.requests.check()
