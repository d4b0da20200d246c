"""The scheduler: which requests get how many tokens in the next step.

Pure Python, no torch. `schedule` makes a plan; `update` applies its result. A plan may be made
before the result of the one before it is known: tokens in flight are counted (`num_pending_tokens`)
but not yet known, and the worker keeps them on the device.
"""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass

from ..cache.kv_manager import KVCacheManager
from ..protocols import SchedulePolicy
from ..types import (
    EngineStats,
    FinishReason,
    SlotStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from .queue import WaitingQueue
from .request import Request, Status


@dataclass(frozen=True)
class Update:
    """What a step brought for one request."""

    request: Request
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finished: bool = False
    error: str | None = None


@dataclass
class _Draft:
    """A plan in the making."""

    budget: int
    decodes: list[Request]
    prefills: list[tuple[Request, int]]
    starts: list[SlotStart]
    appended: list[tuple[int, tuple[int, ...]]]
    preempted: bool = False


class Scheduler:
    """Continuous batching: running requests first, then waiting ones, under one token budget."""

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
        long_prefill_token_threshold: int = 0,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_chunked_prefill = enable_chunked_prefill
        self.policy = policy
        self.max_chunk = long_prefill_token_threshold or max_num_batched_tokens
        self.kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching)
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []
        """In policy order: the last one is the victim of a preemption."""
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._released: list[int] = []
        self._in_flight: dict[int, list[tuple[Request, int]]] = {}
        """Step → its rows' requests, each with its epoch."""
        self._next_step = 0
        self._num_preemptions = 0

    # ------------------------------------------------------------ from outside

    def fits(self, request: Request) -> bool:
        """Whether the cache could hold the request alone."""
        longest = request.num_prompt_tokens + request.max_tokens - 1
        return self.kv.blocks_for(longest) <= self.kv.pool.num_blocks - 1

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that could never run."""
        if request.request_id in self._requests:
            raise ValueError(f"request_id: {request.request_id!r} is queued already")
        if not self.fits(request):
            raise ValueError(f"request {request.request_id!r} never fits in the KV cache")
        request.sort_key = self.policy.key(request)
        self._requests[request.request_id] = request
        self._waiting.push(request)

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> Request | None:
        """End a request in whatever state it is; → it, or None when there is no such one.

        Its blocks are free at once: steps run in order, so whatever is in flight is done with them
        before a later step writes there.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if request.status is Status.RUNNING:
            self._leave(request)
        else:
            self._waiting.remove(request)
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        return request

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False when blocks are in use."""
        if self.kv.pool.num_used:
            return False
        self.kv.pool.forget_all()
        return True

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans whose result has not come."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def stats(self) -> EngineStats:
        """A snapshot."""
        pool = self.kv.pool
        return EngineStats(
            num_requests_running=len(self._running),
            num_requests_waiting=len(self._waiting),
            num_slots=self.max_num_seqs,
            kv_blocks_total=pool.num_blocks - 1,
            kv_blocks_used=pool.num_used,
            kv_cache_usage=pool.num_used / (pool.num_blocks - 1),
            prefix_cache_queries=self.kv.queries,
            prefix_cache_hits=self.kv.hits,
            num_preemptions=self._num_preemptions,
        )

    # ------------------------------------------------------------ making a plan

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run now."""
        draft = _Draft(self.max_num_batched_tokens, [], [], [], [])
        self._schedule_decodes(draft)
        self._schedule_chunks(draft)
        if not draft.preempted:
            self._admit_waiting(draft)
        if not draft.decodes and not draft.prefills:
            return None
        return self._seal(draft)

    def _schedule_decodes(self, draft: _Draft) -> None:
        """One token for each request whose tokens are all computed but the last."""
        index = 0
        while index < len(self._running) and draft.budget > 0:
            request = self._running[index]
            known = len(request.prompt_token_ids) + len(request.output_token_ids)
            num_tokens = known + request.num_pending_tokens
            generated = num_tokens - len(request.prompt_token_ids)
            if request.num_computed_tokens == num_tokens - 1 and generated < request.max_tokens:
                if not self._make_room(request, num_tokens, draft):
                    continue
                draft.decodes.append(request)
                draft.budget -= 1
            index += 1

    def _make_room(self, request: Request, num_tokens: int, draft: _Draft) -> bool:
        """Blocks for `num_tokens`, preempting from the end; False when it preempted `request`."""
        while (new := self.kv.extend(request, num_tokens)) is None:
            victim = self._running[-1]
            self._preempt(victim)
            draft.preempted = True
            if victim is request:
                return False
        if new:
            draft.appended.append((request.slot, tuple(new)))
        return True

    def _schedule_chunks(self, draft: _Draft) -> None:
        """The next chunk of each prompt that is under way."""
        decoding = {id(request) for request in draft.decodes}
        for request in list(self._running):
            if draft.budget == 0:
                return
            if request.status is not Status.RUNNING or id(request) in decoding:
                continue
            missing = request.num_known_tokens - request.num_computed_tokens
            if missing <= 0:
                continue
            count = min(missing, draft.budget, self.max_chunk)
            end = request.num_computed_tokens + count
            while (new := self.kv.extend(request, end)) is None:
                victim = self._running[-1]
                if victim is request or id(victim) in decoding:
                    break
                self._preempt(victim)
                draft.preempted = True
            if new is None:
                continue
            if new:
                draft.appended.append((request.slot, tuple(new)))
            draft.prefills.append((request, count))
            draft.budget -= count

    def _admit_waiting(self, draft: _Draft) -> None:
        """Give free slots to waiting requests, in order, while budget and blocks last."""
        set_aside: list[Request] = []
        while draft.budget > 0 and self._free_slots:
            request = self._waiting.pop()
            if request is None:
                break
            leader = request.leader
            if leader is not None and not (leader.finished or leader.prompt_computed):
                set_aside.append(request)
                continue
            if not self._admit(request, draft):
                set_aside.append(request)
                break
        for request in set_aside:
            self._waiting.push(request)

    def _admit(self, request: Request, draft: _Draft) -> bool:
        hits = self.kv.find_hits(request)
        num_hit = len(hits) * self.kv.block_size
        missing = request.num_known_tokens - num_hit
        if not self.enable_chunked_prefill and missing > draft.budget:
            return False
        whole = self.kv.blocks_for(request.num_known_tokens) - len(hits)
        revived = sum(self.kv.pool.is_free(block) for block in hits)
        if whole + revived > self.kv.pool.num_free and self._running:
            return False
        count = min(missing, draft.budget, self.max_chunk)
        if not self.enable_chunked_prefill:
            count = missing
        if not self.kv.admit(request, hits, count):
            return False
        self.kv.count_lookup(request, num_hit)
        request.slot = self._free_slots.pop()
        request.num_computed_tokens = num_hit
        request.num_registered_blocks = len(hits)
        request.status = Status.RUNNING
        bisect.insort(self._running, request, key=lambda r: r.sort_key)
        draft.starts.append(
            SlotStart(
                slot=request.slot,
                request_id=request.request_id,
                token_ids=tuple(request.tokens(0, request.num_known_tokens)),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=num_hit,
                block_ids=tuple(request.block_ids),
                params=request.params,
                seed=request.seed,
                stop_token_ids=(*sorted(request.eos_token_ids), *request.params.stop_token_ids),
                bad_words_token_ids=request.bad_words_token_ids,
            )
        )
        draft.prefills.append((request, count))
        draft.budget -= count
        self._advance(request, count)
        return True

    def _seal(self, draft: _Draft) -> StepPlan:
        """Count the scheduled tokens as computed and freeze the plan."""
        started = {start.slot for start in draft.starts}
        rows: list[tuple[Request, int]] = [(request, 1) for request in draft.decodes]
        rows.extend(draft.prefills)
        for request, count in rows:
            if request.slot not in started:
                self._advance(request, count)
        plan = StepPlan(
            step=self._next_step,
            slots=tuple(request.slot for request, _ in rows),
            num_tokens=tuple(count for _, count in rows),
            samples=tuple(r.num_computed_tokens == r.num_tokens for r, _ in rows),
            released=tuple(self._released),
            starts=tuple(draft.starts),
            appended_blocks=tuple(draft.appended),
        )
        for (request, _), samples in zip(rows, plan.samples, strict=True):
            request.num_pending_tokens += samples
        self._in_flight[plan.step] = [(request, request.epoch) for request, _ in rows]
        self._released = []
        self._next_step += 1
        return plan

    def _advance(self, request: Request, count: int) -> None:
        request.num_computed_tokens += count
        if request.first_scheduled is None:
            request.first_scheduled = time.monotonic()
        if request.num_computed_tokens // self.kv.block_size > request.num_registered_blocks:
            self.kv.register(request)

    def _preempt(self, request: Request) -> None:
        """Back to waiting, to be computed again from the start."""
        self._leave(request)
        request.status = Status.PREEMPTED
        request.epoch += 1
        request.num_computed_tokens = 0
        request.num_pending_tokens = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.push(request)

    def _leave(self, request: Request) -> None:
        """Give back blocks and slot."""
        self._running.remove(request)
        self.kv.free(request)
        self._free_slots.append(request.slot)
        self._released.append(request.slot)
        request.slot = -1

    # ------------------------------------------------------------ taking a result

    def update(self, plan: StepPlan, result: StepResult) -> list[Update]:
        """Apply a step's result. Rows of requests that ended or were preempted since are dropped."""
        updates: list[Update] = []
        rows = self._in_flight.pop(plan.step)
        for row, (request, epoch) in enumerate(rows):
            if request.epoch != epoch or request.status is Status.FINISHED:
                continue
            if row in result.failed:
                self.finish(request.request_id, "error")
                updates.append(Update(request, [], finished=True, error=result.failed[row]))
                continue
            scores = result.prompt_logprobs.get(row)
            if not plan.samples[row]:
                if scores:
                    updates.append(Update(request, [], prompt_logprobs=scores))
                continue
            token = result.token_ids[row]
            request.num_pending_tokens -= 1
            request.output_token_ids.append(token)
            logprobs = result.logprobs.get(row)
            finished = self._check_stop(request, token)
            if not finished:
                known = request.num_known_tokens
                if known // self.kv.block_size > request.num_registered_blocks:
                    self.kv.register(request)
            updates.append(
                Update(
                    request,
                    [token],
                    logprobs=None if logprobs is None else [logprobs],
                    prompt_logprobs=scores,
                    finished=finished,
                )
            )
        return updates

    def _check_stop(self, request: Request, token: int) -> bool:
        """End the request if `token` does."""
        generated = len(request.output_token_ids)
        if generated >= request.params.min_tokens:
            if token in request.eos_token_ids:
                self.finish(request.request_id, "stop")
                return True
            if token in request.params.stop_token_ids:
                self.finish(request.request_id, "stop", token)
                return True
        if generated >= request.max_tokens:
            self.finish(request.request_id, "length")
            return True
        return False

    # ------------------------------------------------------------ integrity

    def check_invariants(self) -> None:
        """AssertionError if the books do not balance."""
        holders: dict[int, int] = {}
        for request in self._running:
            assert request.status is Status.RUNNING and request.slot >= 0
            for block in request.block_ids:
                holders[block] = holders.get(block, 0) + 1
            needed = self.kv.blocks_for(request.num_computed_tokens)
            assert len(request.block_ids) >= needed, f"{request.request_id}: blocks are missing"
        self.kv.pool.check(holders)
        slots = [request.slot for request in self._running]
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs)), "slots leaked"
        for request in self._waiting:
            assert request.status in (Status.WAITING, Status.PREEMPTED)
            assert not request.block_ids and request.slot == -1
        assert len(self._requests) == len(self._running) + len(self._waiting)
        keys = [request.sort_key for request in self._running]
        assert keys == sorted(keys), "running requests are out of order"
