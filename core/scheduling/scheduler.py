"""Decides what each step computes, and takes in what it produced."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from ..cache.kv_manager import KVCacheManager, NoKVCache
from ..config import KVTransferConfig
from ..protocols import KVConnectorScheduler, SchedulePolicy
from ..types import (
    EngineStats,
    FinishReason,
    KVReport,
    SlotStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from .policy_keys import PolicyKeys
from .queue import RequestQueue
from .request import Request, Status, Update
from .transfers import Fetch, Transfers


@dataclass(slots=True)
class _Draft:
    """A step plan in the making. Decode rows and prefill rows are joined at the end."""

    budget: int
    decodes: list[Request] = field(default_factory=list)
    prefills: list[Request] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    """[len(prefills)] tokens of each prefill row"""
    starts: list[SlotStart] = field(default_factory=list)
    appended: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """What was planned, so that the result finds the requests as they were."""

    rows: list[Request]
    epochs: list[int]
    """[num_rows] A request whose epoch differs by now has ended or was preempted since."""
    first_positions: dict[int, int]
    """Row → first position computed, where prompt logprobs are asked for."""
    ends: list[int]
    """[num_rows] tokens computed with this step; empty without a KV connector."""


class Scheduler:
    """Continuous batching over a paged KV cache, with any number of steps in flight.

    `schedule()` plans a step, `update()` takes its result; a step may be planned before the one
    before it is back: how many tokens a request gets is known, only which ones is not. A running
    decode is scheduled on its pending token, whose id stays on the device.

    Running requests get their tokens first, in policy order; then waiting ones are admitted in
    policy order. When blocks run out, the last running request in that order loses its blocks and
    slot and is computed again later, so the first one always gets on.
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
        connector: KVConnectorScheduler | None = None,
        transfer: KVTransferConfig | None = None,
        hash_key: bytes | None = None,
    ) -> None:
        """`policy_name`: for errors. `connector`, if any, serves as `transfer` says; `hash_key`:
        see `BlockHasher`."""
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_chunked_prefill = enable_chunked_prefill
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self._keys = PolicyKeys(policy, policy_name)
        self.kv = (
            KVCacheManager(num_blocks, block_size, enable_prefix_caching, hash_key)
            if num_blocks
            else NoKVCache(block_size)
        )
        self.transfers: Transfers | None = None
        self._fail_on_load = False
        if connector is not None:
            transfer = transfer or KVTransferConfig(kv_connector="")
            self._fail_on_load = transfer.kv_load_failure_policy == "fail"
            self.transfers = Transfers(
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
        """Waiting for a KV connector."""
        self._arrivals = count()
        self._steps = count()
        self._free_slots = list(range(max_num_seqs))
        self._released: list[int] = []
        self._in_flight: dict[int, _Step] = {}
        self._failures: list[Update] = []
        self._stats = EngineStats(num_slots=max_num_seqs, kv_blocks_total=self.kv.num_usable_blocks)
        self._admission_reserve = num_blocks // 100

    # ------------------------------------------------------------ requests in and out

    def unfit_reason(self, request: Request) -> str | None:
        """Why this request could never finish here, or None when it can."""
        num_prompt = request.num_prompt_tokens
        if not 0 < num_prompt < self.max_model_len:
            return (
                f"the prompt has {num_prompt} tokens; it needs 1 to {self.max_model_len - 1} "
                f"(max_model_len {self.max_model_len})"
            )
        if not self.enable_chunked_prefill and num_prompt > self.max_num_batched_tokens:
            return (
                f"the prompt has {num_prompt} tokens, but without chunked prefill a step takes "
                f"{self.max_num_batched_tokens} (max_num_batched_tokens)"
            )
        # The last token is sampled but never computed: it needs no KV.
        longest = min(request.max_total_tokens, self.max_model_len) - 1
        needed = self.kv.blocks_for(longest)
        if needed > self.kv.num_usable_blocks:
            return (
                f"prompt and max_tokens need {needed} KV-cache blocks; there are "
                f"{self.kv.num_usable_blocks} of {self.kv.block_size} tokens"
            )
        return None

    def fits(self, request: Request) -> bool:
        """Whether this request can finish at all, alone in the engine."""
        return self.unfit_reason(request) is None

    def add(self, *requests: Request) -> None:
        """Queue requests, all of them or none. One that can never fit fails: see `take_failures`.

        Raises RequestFailed where the policy fails on one; nothing is left of any then.
        """
        ids = {request.request_id for request in requests}
        if len(ids) < len(requests) or not ids.isdisjoint(self.requests):
            raise ValueError(f"already scheduled, or twice here: one of {sorted(ids)}")
        keys = [
            self._keys.of(request, alone=not self.requests and index == 0)
            for index, request in enumerate(requests)
        ]
        for request, key in zip(requests, keys, strict=True):
            request.order = (*key, next(self._arrivals))
            self.requests[request.request_id] = request
            self.waiting.add(request)
            if (reason := self.unfit_reason(request)) is not None:
                self._fail(request, reason, self._failures)
                continue
            request.max_total_tokens = min(request.max_total_tokens, self.max_model_len)
            if request.leader is not None and not self.kv.enable_prefix_caching:
                request.leader.private_salt = request.private_salt = request.leader.request_id

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> Request | None:
        """End a request wherever it stands; None when it is unknown or has ended already."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request, reason, stop_reason)
        return request

    def fail_all(self, error: str) -> list[Update]:
        """The device failed: end every request, drop steps in flight and all cached content."""
        updates = self.take_failures()
        self._in_flight.clear()
        for request in list(self.requests.values()):
            self._fail(request, error, updates)
        if self.transfers is not None:
            self.transfers.abandon()
        self.kv.reset_prefix_cache()
        return updates

    def fail_step(self, plan: StepPlan, error: str) -> list[Update]:
        """A step failed as a whole, and those planned after it were not run: end its requests.

        The worker has forgotten all slots. Running requests that had no part in the step start
        again as preempted ones do, and no prefix hit finds what was cached: steps that were
        planned after the failed one may have registered blocks that were never filled. Not for
        use with a KV connector, whose transfers a failed step leaves without an end.
        """
        assert self.transfers is None, "a failed step with a KV connector ends the engine"
        step = self._in_flight[plan.step]
        self._in_flight.clear()
        updates = self.take_failures()
        for request, epoch in zip(step.rows, step.epochs, strict=True):
            if request.epoch == epoch:
                self._fail(request, error, updates)
        for request in reversed(self.running.requests[:]):
            self._preempt(request)
        self._released.clear()
        self.kv.reset_prefix_cache()
        return updates

    def take_failures(self) -> list[Update]:
        """Updates that belong to no step. `update` returns them too; ask when nothing runs."""
        failures, self._failures = self._failures, []
        return failures

    # ------------------------------------------------------------ planning

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a result or a request comes in."""
        draft = _Draft(self.max_num_batched_tokens)
        if self._schedule_running(draft):
            self._admit_waiting(draft)
        metadata = None
        if self.transfers is not None:
            metadata = self.transfers.metadata()
            news = self.transfers.take_news()
            if metadata is not None or news:
                return self._seal(draft, metadata)
        if not draft.decodes and not draft.prefills:
            return None
        return self._seal(draft, metadata)

    def _schedule_running(self, draft: _Draft) -> bool:
        """Tokens for running requests; False when one had to be preempted.

        A victim comes off the end of the list that is being walked, so it is never one that this
        plan already holds.
        """
        block_size = self.kv.block_size
        decodes = draft.decodes
        budget = draft.budget
        num_running = len(self.running)
        for request in self.running.requests:
            if budget <= 0:
                break
            computed = request.num_computed_tokens
            num_tokens = request.num_tokens
            if num_tokens - computed == 1:
                if num_tokens >= request.max_total_tokens:
                    continue  # its last token is in flight
                if computed % block_size == 0 and not self._grow(request, 1, draft):
                    break
                request.num_computed_tokens = num_tokens
                request.num_tokens = num_tokens + 1
                decodes.append(request)
                budget -= 1
            else:
                chunk = self._chunk(num_tokens - computed, budget)
                if not self._grow(request, chunk, draft):
                    break
                self._add_prefill(draft, request, chunk)
                budget -= chunk
        draft.budget = budget
        return len(self.running) == num_running

    def _grow(self, request: Request, num_new_tokens: int, draft: _Draft) -> bool:
        """Blocks for the request's next tokens, taken from those behind it; False: it went too."""
        self.kv.register(request)
        while (blocks := self.kv.allocate(request, num_new_tokens)) is None:
            victim = self.running.requests[-1]
            self._preempt(victim)
            if victim is request:
                return False
        if blocks:
            draft.appended.append((request.slot, tuple(blocks)))
        return True

    def _chunk(self, num_tokens: int, budget: int) -> int:
        """Tokens of a prompt that this step takes."""
        if self.long_prefill_token_threshold and self.enable_chunked_prefill:
            num_tokens = min(num_tokens, self.long_prefill_token_threshold)
        return min(num_tokens, budget)

    def _admit_waiting(self, draft: _Draft) -> None:
        """Admit waiting requests in order, until one finds no budget, slot or blocks."""
        left = []
        for request in self.waiting.requests:
            if draft.budget <= 0 or not self._free_slots:
                break
            if _waits_for_leader(request):
                continue
            hits = self.kv.find_hits(request)
            if self.transfers is not None:
                reserve = self._admission_reserve if len(self.running) else 0
                fetch = self.transfers.fetch(request, hits, reserve)
                if fetch is Fetch.NO_ROOM:
                    break
                if fetch is Fetch.STARTED:
                    self.loading.add(request)
                    left.append(request)
                if fetch is not Fetch.NOTHING:
                    continue
            if not self._admit(request, hits, draft):
                break
            left.append(request)
        for request in left:
            self.waiting.remove(request)

    def _admit(self, request: Request, hits: list[int], draft: _Draft) -> bool:
        num_left = request.num_tokens - len(hits) * self.kv.block_size
        # A preempted request may have outgrown one step's budget; it is chunked all the same.
        must_be_whole = (
            not self.enable_chunked_prefill and request.num_tokens <= self.max_num_batched_tokens
        )
        if must_be_whole and num_left > draft.budget:
            return False
        # Room for all its tokens, though only a chunk's blocks are taken now, and a little to
        # spare for the running ones: to admit what would soon be preempted wastes work.
        reserve = self._admission_reserve if len(self.running) else 0
        if not self.kv.can_hold(request.num_tokens, hits, reserve):
            return False
        chunk = self._chunk(num_left, draft.budget)
        self.kv.allocate(request, chunk, hits)
        request.num_offered_blocks = len(hits)
        if request.first_scheduled is None:
            request.first_scheduled = time.monotonic()
            request.num_cached_tokens = request.num_computed_tokens
            self.kv.count_lookup(
                request, max(0, request.num_cached_tokens - request.num_loaded_tokens)
            )
            self._stats.prompt_tokens += request.num_prompt_tokens
        request.status = Status.RUNNING
        request.slot = heapq.heappop(self._free_slots)
        self.running.add(request)
        draft.starts.append(_slot_start(request))
        self._add_prefill(draft, request, chunk)
        draft.budget -= chunk
        return True

    def _add_prefill(self, draft: _Draft, request: Request, chunk: int) -> None:
        draft.prefills.append(request)
        draft.chunks.append(chunk)
        request.num_computed_tokens += chunk
        self.kv.register(request)
        if request.num_computed_tokens == request.num_tokens:
            request.num_tokens += 1

    def _seal(self, draft: _Draft, metadata: Any = None) -> StepPlan:
        rows = draft.decodes + draft.prefills
        num_decodes = len(draft.decodes)
        first_positions = {
            num_decodes + i: request.num_computed_tokens - draft.chunks[i]
            for i, request in enumerate(draft.prefills)
            if request.params.prompt_logprobs is not None
        }
        step = next(self._steps)
        self._stats.steps += 1
        ends = [] if self.transfers is None else [r.num_computed_tokens for r in rows]
        self._in_flight[step] = _Step(rows, [r.epoch for r in rows], first_positions, ends)
        released, self._released = self._released, []
        return StepPlan(
            step=step,
            slots=tuple([r.slot for r in rows]),
            num_tokens=(1,) * num_decodes + tuple(draft.chunks),
            samples=(True,) * num_decodes
            + tuple([r.num_pending_tokens > 0 for r in draft.prefills]),
            released=tuple(released),
            starts=tuple(draft.starts),
            appended_blocks=tuple(draft.appended),
            kv_metadata=metadata,
        )

    # ------------------------------------------------------------ results

    def update(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Take in a step's result: append tokens, end what is done.

        Rows of requests that have ended or were preempted since the plan was made are dropped.
        """
        step = self._in_flight.pop(plan.step)
        updates = self.take_failures()
        if result.kv_report is not None:
            self._take_report(result.kv_report, updates)
        logprobs = result.logprobs
        num_new = 0
        rows = zip(step.rows, step.epochs, plan.samples, result.token_ids, strict=True)
        for row, (request, epoch, sampled, token_id) in enumerate(rows):
            if request.epoch != epoch:
                continue
            if row in result.failed:
                self._fail(request, result.failed[row], updates)
                continue
            if self.transfers is not None:
                self.transfers.offer(request, step.ends[row])
            if request.pooling is not None:
                if sampled:
                    self._end(request, "stop")
                    updates.append(Update(request, [], pooled=result.pooled[row], finished=True))
                continue
            update = Update(request, [token_id] if sampled else [])
            if row in step.first_positions:
                update.prompt_logprobs = _new_prompt_logprobs(
                    request, step.first_positions[row], result.prompt_logprobs.get(row)
                )
            if sampled:
                num_new += 1
                request.output_token_ids.append(token_id)
                if row in logprobs:
                    update.logprobs = [logprobs[row]]
                # Cheap signs first: few tokens can be the last.
                if token_id in request.stop_ids or request.num_tokens >= request.max_total_tokens:
                    stop = request.stop_on(token_id)
                    if stop is not None:
                        self._end(request, *stop)
                        update.finished = True
            elif update.prompt_logprobs is None:
                continue
            updates.append(update)
        self._stats.generation_tokens += num_new
        self._stats.late_preparations += result.late_preparations
        return updates

    def _take_report(self, report: KVReport, updates: list[Update]) -> None:
        """Requests whose load has ended queue again: what it brought is cached now."""
        assert self.transfers is not None, "a report without a KV connector"
        for request, complete in self.transfers.take(report):
            if not complete and self._fail_on_load:
                self._fail(request, "its KV could not be loaded", updates)
                continue
            self.loading.remove(request)
            request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
            self.waiting.add(request)

    # ------------------------------------------------------------ transitions

    def _preempt(self, request: Request) -> None:
        """Back to the queue, to be computed again; what steps in flight bring for it is dropped."""
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
        if self.transfers is not None:
            self.transfers.finish(request)
        self.kv.free(request)
        request.status = Status.FINISHED
        request.epoch += 1
        del self.requests[request.request_id]
        finished = self._stats.requests_finished
        finished[reason] = finished.get(reason, 0) + 1

    def _fail(self, request: Request, error: str, updates: list[Update]) -> None:
        self.kv.distrust(request)
        self._end(request, "error")
        updates.append(Update(request, [], finished=True, error=error))

    def _leave_slot(self, request: Request) -> None:
        self.running.remove(request)
        heapq.heappush(self._free_slots, request.slot)
        self._released.append(request.slot)
        request.slot = -1

    # ------------------------------------------------------------ looking in

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Waiting for admission, first or after preemption, or for a load."""
        return len(self.waiting) + len(self.loading)

    @property
    def in_flight(self) -> int:
        """Steps planned whose result has not come."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a failure untold."""
        return bool(self.requests or self._failures)

    @property
    def stats(self) -> EngineStats:
        """A snapshot."""
        return msgspec.structs.replace(
            self._stats,
            num_requests_running=self.num_running,
            num_requests_waiting=self.num_waiting,
            kv_blocks_used=self.kv.num_used_blocks,
            kv_cache_usage=self.kv.usage,
            prefix_cache_queries=self.kv.num_queried_tokens,
            prefix_cache_hits=self.kv.num_hit_tokens,
            requests_finished=dict(self._stats.requests_finished),
            **({} if self.transfers is None else self.transfers.counts),
        )

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks; False while a request runs."""
        return self.kv.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Raise AssertionError with what is wrong, if the books do not balance."""
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
            assert len(r.block_ids) == self.kv.blocks_for(r.num_computed_tokens), (
                f"{r.request_id}: {len(r.block_ids)} blocks for {r.num_computed_tokens} tokens"
            )
        for r in waiting:
            assert r.status in (Status.WAITING, Status.PREEMPTED), f"{r.request_id} is {r.status}"
        for r in loading:
            assert r.status is Status.LOADING, f"{r.request_id} is {r.status}, but loads"
        for r in [*waiting, *loading]:
            assert not r.block_ids and r.slot < 0, f"{r.request_id} waits, but holds blocks"
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
        block_ids=tuple(request.block_ids),
        params=request.params,
        seed=request.seed,
        stop_token_ids=tuple(sorted(request.stop_ids)),
        bad_words_token_ids=request.bad_words_token_ids,
        grammar=request.grammar,
        pooling=request.pooling,
        token_type_ids=request.token_type_ids,
    )


def _new_prompt_logprobs(
    request: Request, first_position: int, found: list[TokenLogprobs] | None
) -> list[TokenLogprobs] | None:
    """Those not passed on yet: a preempted request's prompt is computed more than once.

    Position p tells about prompt token p + 1; `num_prompt_logprobs` of them are known, from the
    first on.
    """
    if found is None:
        return None
    new = found[max(0, request.num_prompt_logprobs - first_position) :]
    request.num_prompt_logprobs += len(new)
    return new or None
