"""The scheduler: plans what each step computes, and processes its result."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import TypeVar

import msgspec

from ..cache.groups import ONE_GROUP, CacheGroup
from ..cache.kv_manager import KVCacheManager, NoKVCache
from ..errors import RequestFailed
from ..live.engine_jobs import FIRST_VERSION
from ..outputs import EngineStats, FinishReason
from ..protocols.executors import SchedulePolicy
from ..request import Request, Update
from ..step import NO_TOKEN, NOTHING_IN_PROCESS, InProcess, StepPlan, StepResult
from ..token_lists import barring_fields
from .limits import RequestLimits
from .live_requests import LiveRequests
from .pacing.plan_timing import StepPace
from .pacing.step_sizes import StepSizes
from .parts.part import PartMaker, PartServices, SchedulerPart
from .parts.part_set import SchedulerParts
from .plan_builder import PlanBuilder, PlannedStep
from .policy_keys import PolicyKeys
from .prefill_chunks import PrefillChunks
from .queues.decode_rows import DecodeRows
from .row_planner import RowPlanner

P = TypeVar("P", bound=SchedulerPart)
logger = logging.getLogger("jackfield.engine")


def _no_token(request: Request) -> tuple[str, str | None]:
    """Return why the sampler found no token, and the field at fault, if the request's lists are."""
    fields: list[str] = []
    if request.grammar is None:  # Of others, masks respect the lists.
        fields = barring_fields(request.params, request.bad_words_token_ids, request.stop_ids)
    if not fields:
        return NO_TOKEN, None
    param, *others = fields
    return f"{param}: with {' and '.join(others)}, no token is left that may come next", param


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Scheduler:
    """Continuous batching over a paged KV cache, with any number of steps in flight.

    `schedule()` plans a step, `update()` processes its result. A step may be planned before the
    previous result, as only token ids, which stay on the device, are unknown.

    Running requests get tokens first, then waiting ones are admitted, in policy order. When blocks
    run out, the last running request loses its blocks and slot and is recomputed later, so the
    first always progresses.
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
        hash_key: bytes | None = None,
        groups: Sequence[CacheGroup] = ONE_GROUP,
        num_snapshots: int | None = None,
        ttft_target: float = 0.0,
        itl_target: float = 0.0,
        parts: Sequence[PartMaker] = (),
        describe: Callable[[Exception], str] = described,
    ) -> None:
        """hash_key: see `BlockHasher`. groups: layers that share a block table. num_snapshots: of
        states; None: no states. ttft_target, itl_target: see `StepSizes`; some parts disallow
        pauses. parts: makers in calling order. describe: error of a row → the request's.
        """
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._keys = PolicyKeys(policy, policy_name)
        chunks = PrefillChunks(chunked=enable_chunked_prefill, longest=long_prefill_token_threshold)
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
        """Limits checked by admission; they shrink with lost blocks."""
        self._describe = describe
        self._failures: list[Update] = []
        self._stats = EngineStats(num_slots=max_num_seqs, kv_blocks_total=self.kv.num_usable_blocks)
        self._parts = SchedulerParts()
        self.requests = LiveRequests(max_num_seqs, self.kv, self._stats, self._parts)
        services = PartServices(
            kv=self.kv,
            requests=self.requests,
            parts=self._parts,
            stats=self._stats,
            max_num_batched_tokens=max_num_batched_tokens,
            chunked=enable_chunked_prefill,
            publish=self._failures.append,
            lose_blocks=self._shrink_limits,
        )
        self._parts.make(parts, services)
        self._short_steps = all(part.short_steps for part in self._parts)
        pauses = all(part.pauses_decodes for part in self._parts)
        self.sizes = StepSizes(
            max_num_batched_tokens,
            chunked=enable_chunked_prefill,
            ttft_target=ttft_target if pauses else 0.0,
            itl_target=itl_target,
        )
        decoding: DecodeRows | None = None
        if num_blocks and not self._parts.looks_at_each_row:
            counts_late = all(part.counts_late for part in self._parts)
            decoding = DecodeRows(block_size, counts_late=counts_late)
            self.requests.follow(decoding)
        self._rows = RowPlanner(
            self.requests,
            self.kv,
            chunks,
            max_num_batched_tokens=max_num_batched_tokens,
            admission_reserve=num_blocks // 100,
            parts=self._parts,
            decoding=decoding,
        )
        self._steps = count()
        self._versions = ((0, FIRST_VERSION),)
        """`Request.weight_versions` of a new request."""
        self._in_flight: dict[int, PlannedStep] = {}

    # ------------------------------------------------------------ requests in and out

    def add_requests(self, *requests: Request) -> None:
        """Queue requests within `limits`, all or none.

        Raises RequestFailed if the policy fails.
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
            request.weight_versions = self._versions
        for request, key in zip(requests, keys, strict=True):
            self.requests.add(request, key)
            if request.leader is None:
                self._stats.prompt_tokens += request.num_prompt_tokens
            elif not self.kv.enable_prefix_caching:
                request.leader.private_salt = request.private_salt = request.leader.request_id

    def finish_request(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> Request | None:
        """End a request; None if unknown or ended."""
        request = self.requests.by_id.get(request_id)
        if request is not None:
            self.requests.end(request, reason, stop_reason)
        return request

    def fail_all(self, error: str) -> list[Update]:
        """End every request after a device failure; drop steps in flight and cached content."""
        self._in_flight.clear()
        for request in list(self.requests.by_id.values()):
            try:
                self._failures.append(self.requests.fail(request, error))
            except Exception:
                # What ended the engine may raise again; its caller hears of the end all the same.
                logger.exception("request %s: its end failed", request.external_id)
                request.finish_reason = "error"
                self._failures.append(Update(request, [], finished=True, error=error))
        try:
            for abandon in self._parts.abandon:
                abandon()
            self.kv.reset_prefix_cache()
        except Exception:
            logger.exception("parts could not be told of the engine's end")
        return self.take_failures()

    def not_taken(self, plan: StepPlan) -> None:
        """The executor raised instead of taking the last plan, of which nothing arrived;
        `fail_step` follows.
        """
        for name, part in plan.parts.items():
            if (not_taken := self._parts.not_taken.get(name)) is not None:
                not_taken(part)

    def fail_step(
        self, plan: StepPlan, error: str, dropped: Iterable[StepResult] = ()
    ) -> list[Update]:
        """End the requests of a failed step; later planned steps were not run.

        The worker has forgotten all slots. Other running requests restart like preempted ones, and
        the prefix cache is cleared, as it may have unfilled blocks. Of `dropped`, later steps'
        results, only parts' reports count.
        """
        step = self._in_flight[plan.step]
        self._in_flight.clear()
        for request, epoch in zip(step.rows, step.epochs, strict=True):
            if request.epoch == epoch:
                self._failures.append(self.requests.fail(request, error))
        for request in reversed(self.requests.running.requests[:]):
            self.requests.preempt(request)
        self.requests.take_released()  # The worker has forgotten them.
        self.kv.forget_all()
        for step_failed in self._parts.step_failed:
            step_failed(dropped)
        return self.take_failures()

    def take_failures(self) -> list[Update]:
        """Return updates without a step, as `update` also does."""
        failures = self._failures[:]
        self._failures.clear()
        return failures

    # ------------------------------------------------------------ planning

    def schedule(self, pace: StepPace | None = None) -> StepPlan | None:
        """Plan the next step; None if it must wait for a result or request.

        pace: shortens steps with prompts (`StepSizes`); None: full length.
        """
        self.kv.register_pending()
        if not self._parts.turns:
            return self._schedule(pace)
        requests = self.requests
        admits = requests.has_free_slot and bool(requests.waiting.requests)
        for _ in self._parts.turns[0](requests.running.requests, admits):
            if (plan := self._schedule(pace)) is not None:
                return plan
        return None

    def _schedule(self, pace: StepPace | None) -> StepPlan | None:
        """Plan a step, within a part's turn if there are turns."""
        pace = pace if self._short_steps else None
        size = self.sizes.next_size(
            pace,
            len(self.requests.running),
            [] if pace is None else self._rows.running_prompts(),
            self.requests.waiting.requests,
            self._rows.num_left,
            self._rows.has_streams,
        )
        builder = PlanBuilder(*size)
        for begin_plan in self._parts.begin_plan:
            begin_plan(builder)
        if self._rows.schedule_running(builder):
            self._rows.admit_waiting(builder)
        if builder.prompts_alone and not builder.has_rows:
            # No prompt found blocks: decode rows need not wait.
            self.sizes.end_pause()
            builder.prompts_alone = False
            self._rows.schedule_running(builder)
        for rows_chosen in self._parts.rows_chosen:
            if rows_chosen(builder):
                self._rows.admit_waiting(builder)
        needed = [needs_plan() for needs_plan in self._parts.needs_plan]
        if builder.has_rows or any(needed):
            return self._build_plan(builder)
        return None

    def owed_plan(self) -> StepPlan | None:
        """Plan a step without rows that must run while requests may have none; None: none must."""
        if not any([must_step() for must_step in self._parts.must_step]):
            return None
        builder = PlanBuilder(0, prompts_alone=False, longest_whole=0)
        for begin_plan in self._parts.begin_plan:
            begin_plan(builder)
        return self._build_plan(builder)

    def _build_plan(self, builder: PlanBuilder) -> StepPlan:
        step = next(self._steps)
        planned = self._in_flight[step] = builder.planned()
        parts = {
            name: part
            for name, plan_part in self._parts.plan_part
            if (part := plan_part(step, builder)) is not None
        }
        released = self.requests.take_released()
        return builder.plan(step, planned, released=released, parts=parts)

    def submitted(self) -> None:
        """Work deferred until the plan is sent; otherwise the next `schedule` does it."""
        self.kv.register_pending()

    def in_process(self, plan: StepPlan) -> InProcess:
        """Return what accompanies a plan to the executor, right after `schedule`."""
        starting = [start.slot for start in plan.starts if start.grammar is not None]
        if not starting:
            return NOTHING_IN_PROCESS
        grammars = {r.slot: r.grammar for r in self._in_flight[plan.step].rows}
        return InProcess({slot: g for slot in starting if (g := grammars[slot]) is not None})

    # ------------------------------------------------------------ results

    def update(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Process a step's result: append tokens, end requests.

        Ignores rows of requests that ended or were preempted, and tokens after a row's end.
        """
        step = self._in_flight.pop(plan.step)
        for begin_result in self._parts.begin_result:
            begin_result(plan, result)
        updates = self.take_failures()
        logprobs, failed, first_positions = result.logprobs, result.failed, step.first_positions
        settle_parts, kept_by_parts = self._parts.of_rows(plan, result)
        num_new = 0
        rows = zip(step.rows, step.epochs, result.rows(), strict=True)
        for row, (request, epoch, new) in enumerate(rows):
            if request.epoch != epoch:
                continue
            if failed and row in failed:
                reason, param = failed[row], result.failed_params.get(row)
                if reason == NO_TOKEN:
                    reason, param = _no_token(request)
                updates.append(self.requests.fail(request, reason, param))
                continue
            try:
                num_tokens = len(new)
                if settle_parts:
                    for settle in settle_parts:
                        settle(request, row, plan, result)
                if request.pooling is not None:
                    if plan.samples[row]:
                        self.requests.end(request, "stop")
                        updates.append(
                            Update(request, [], pooled=result.pooled[row], finished=True)
                        )
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
                    if kept_by_parts:
                        for kept in kept_by_parts:
                            reason = kept(request, row, result, new)
                            if reason is not None and not update.finished:
                                self.requests.end(request, reason)
                                update.finished = True
                    if logprobs and row in logprobs:
                        update.logprobs = logprobs[row][: len(new)]
                elif plan.samples[row]:
                    updates.append(self.requests.fail(request, "the step brought no token for it"))
                    continue
                elif update.prompt_logprobs is None:
                    continue
                updates.append(update)
            except Exception as error:
                updates.append(self._fail_row(request, error))
        self._stats.steps += 1
        self._stats.generation_tokens += num_new
        self._stats.late_preparations += result.late_preparations
        self._stats.graph_recording_failures += result.graph_recording_failures
        return updates

    def _fail_row(self, request: Request, error: Exception) -> Update:
        """End a request whose result failed. Raises the error if that fails, too."""
        if isinstance(error, RequestFailed):
            reason = str(error)
        else:
            reason = f"a step's result could not be applied: {self._describe(error)}"
            logger.error("request %s: %s", request.external_id, reason, exc_info=error)
        if request.finished:
            request.finish_reason = "error"
            return Update(request, [], finished=True, error=reason)
        try:
            return self.requests.fail(request, reason)
        except Exception:
            raise error from None

    def _shrink_limits(self, num_lost_blocks: int) -> None:
        """Fail requests that cannot finish after losing blocks."""
        num_blocks = self.kv.num_usable_blocks - num_lost_blocks
        self.limits = dataclasses.replace(self.limits, num_blocks=num_blocks)
        for request in list(self.requests.by_id.values()):
            reason = self.limits.rejection_reason(
                request.num_prompt_tokens, request.max_total_tokens
            )
            if reason is not None:
                self._failures.append(self.requests.fail(request, reason))

    # ------------------------------------------------------------ looking in

    def part(self, kind: type[P]) -> P | None:
        return self._parts.find(kind)

    @property
    def num_running(self) -> int:
        return len(self.requests.running)

    @property
    def num_waiting(self) -> int:
        """Requests waiting for admission or a load."""
        return len(self.requests.waiting) + len(self.requests.loading)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_steps(self) -> int:
        return self._stats.steps

    @property
    def has_work(self) -> bool:
        """Whether a request or an unreturned failure exists."""
        return bool(self.requests.by_id or self._failures)

    @property
    def stats(self) -> EngineStats:
        return msgspec.structs.replace(
            self._stats,
            num_requests_running=self.num_running,
            num_requests_waiting=self.num_waiting,
            num_requests_deferred=len(self.requests.loading),
            kv_blocks_used=self.kv.num_used_blocks,
            kv_cache_usage=self.kv.usage,
            prefix_cache_queries=self.kv.num_queried_tokens,
            prefix_cache_hits=self.kv.num_hit_tokens,
            **self._parts.counts,
        )

    def restart_running(self) -> int:
        """Let running requests be computed again, from their first token. Return how many. No step
        is in flight."""
        assert not self._in_flight, "results of steps in flight would be lost"
        running = self.requests.running.requests[:]
        for request in reversed(running):
            self.requests.preempt(request)
        return len(running)

    def change_weights(self, version: str, identity: str) -> None:
        """Note that other weights compute from the next step on. No step is in flight.

        Requests that run go on with their caches; see `restart_running`. identity: see
        `KVCacheManager.change_weights`.
        """
        self.kv.change_weights(identity, self.requests.by_id.values())
        for weights_changed in self._parts.weights_changed:
            weights_changed()
        self.name_weights(version)

    def name_weights(self, version: str) -> None:
        """Note that later tokens are of this version. No step is in flight."""
        self._versions = ((0, version),)
        for request in self.requests.by_id.values():
            num_outputs = len(request.output_token_ids)
            before = [span for span in request.weight_versions if span[0] < num_outputs]
            request.weight_versions = (*before, (num_outputs, version))

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False, unchanged, while a request runs."""
        return self.kv.reset_prefix_cache()

    def check_invariants(self) -> None:
        self.requests.check()
