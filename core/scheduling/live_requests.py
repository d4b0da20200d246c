"""Unfinished requests: running, waiting or loading."""

from __future__ import annotations

import heapq
from itertools import chain, count
from typing import Any

from ..cache.kv_manager import KVCacheManager
from ..outputs import EngineStats, FinishReason
from ..request import NEVER, Request, Status, Update
from .parts.part_set import SchedulerParts
from .queues.decode_rows import DecodeRows
from .queues.queue import RequestQueue


class LiveRequests:
    """Each unfinished request is in one queue; running ones have a slot."""

    def __init__(
        self,
        num_slots: int,
        kv: KVCacheManager,
        stats: EngineStats,
        parts: SchedulerParts,
    ) -> None:
        self.by_id: dict[str, Request] = {}
        self.running = RequestQueue()
        self.waiting = RequestQueue()
        self.loading = RequestQueue()
        """Requests that wait for a part, such as a KV load."""
        self._num_slots = num_slots
        self._kv = kv
        self._stats = stats
        self._parts = parts
        self._decoding: DecodeRows | None = None
        self._arrivals = count()
        self._free_slots = list(range(num_slots))
        self._released: list[int] = []

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def follow(self, decoding: DecodeRows) -> None:
        """Report to `decoding` which requests run."""
        self._decoding = decoding

    def recount(self, request: Request) -> None:
        """Note that the counters of a running request, which are exact now, are about to change."""
        if self._decoding is not None:
            self._decoding.recount(request)

    def count_tokens(self) -> None:
        """Make the counters of decoding requests exact, which lag between plans."""
        if self._decoding is not None:
            self._decoding.count_tokens()

    # ------------------------------------------------------------ transitions

    def add(self, request: Request, key: tuple[Any, ...]) -> None:
        request.order = (*key, next(self._arrivals))
        self.by_id[request.request_id] = request
        self.waiting.add(request)
        for added in self._parts.added:
            added(request)

    def run(self, request: Request) -> None:
        """Give a request, removed from `waiting`, a slot."""
        request.slot = heapq.heappop(self._free_slots)
        request.status = Status.RUNNING
        self.running.add(request)
        if self._decoding is not None:
            self._decoding.add(request)

    def preempt(self, request: Request) -> None:
        """Requeue a running request, to be recomputed; drop results in flight."""
        self._leave_slot(request)
        self._kv.free(request)
        request.status = Status.PREEMPTED
        request.epoch += 1
        request.num_preempted_tokens = min(request.num_computed_tokens, request.num_known_tokens)
        request.num_computed_tokens = 0
        request.num_tokens = request.num_known_tokens
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        self.waiting.add(request)

    def count_restart(self, request: Request) -> None:
        """Count a restarted request's cached tokens."""
        num_restored = min(request.num_computed_tokens, request.num_preempted_tokens)
        self._stats.preempted_tokens_restored += num_restored
        self._stats.preempted_tokens_recomputed += request.num_preempted_tokens - num_restored
        request.num_preempted_tokens = 0

    def wait_for_part(self, request: Request) -> None:
        """Let a request, removed from `waiting`, wait for a part, which calls `wait_again`."""
        request.status = Status.LOADING
        self.loading.add(request)

    def wait_again(self, request: Request) -> None:
        self.loading.remove(request)
        request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
        self.waiting.add(request)

    def end(
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
        for ended in self._parts.ended:
            ended(request)
        self._kv.free(request)
        request.status = Status.FINISHED
        request.epoch += 1
        del self.by_id[request.request_id]

    def fail(self, request: Request, error: str, param: str | None = None) -> Update:
        """End a request whose blocks may be invalid.

        param: the request's faulty field, or None.
        """
        self._kv.invalidate(request)
        for invalidate in self._parts.invalidate:
            invalidate(request)
        self.end(request, "error")
        return Update(request, [], finished=True, error=error, error_param=param)

    def _leave_slot(self, request: Request) -> None:
        self.running.remove(request)
        if self._decoding is not None:
            self._decoding.remove(request)
        for leave in self._parts.leave:
            leave(request)
        request.look_at = NEVER
        heapq.heappush(self._free_slots, request.slot)
        self._released.append(request.slot)
        request.slot = -1

    def take_released(self) -> list[int]:
        """Return, once, the slots left by requests."""
        released, self._released = self._released, []
        return released

    # ------------------------------------------------------------ looking in

    def check(self) -> None:
        running, waiting = self.running.requests, self.waiting.requests
        if self._decoding is not None:
            self._decoding.check(running)
        loading = self.loading.requests
        for name, queue in (("running", running), ("waiting", waiting), ("loading", loading)):
            orders = [r.order for r in queue]
            assert orders == sorted(orders), f"the {name} requests are out of order"
        places = [*running, *waiting, *loading]
        queued = {r.request_id for r in places}
        assert len(queued) == len(places), "a request stands in two places"
        assert queued == set(self.by_id), f"lost or left over: {queued ^ set(self.by_id)}"
        slots = sorted([*self._free_slots, *(r.slot for r in running)])
        assert slots == list(range(self._num_slots)), f"slots leaked or used twice: {slots}"
        for r in running:
            assert r.status is Status.RUNNING, f"{r.request_id} is {r.status}, but runs"
            certain = r.num_tokens - r.num_unverified_tokens
            assert r.num_known_tokens <= r.num_tokens and certain <= r.max_total_tokens, (
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
        awaited = [r.request_id for each in self._parts.awaited for r in each()]
        assert sorted(awaited) == sorted(r.request_id for r in loading), (
            "parts do not wait for exactly the loading requests"
        )
        for r in [*waiting, *loading]:
            assert not r.tables and r.slot < 0, f"{r.request_id} waits, but holds blocks"
            assert r.num_computed_tokens == 0 and r.num_pending_tokens == 0, (
                f"{r.request_id} waits, but counts computed tokens"
            )
            assert r.num_unverified_tokens == 0, f"{r.request_id} waits, but counts drafts"
        blocks = list(chain.from_iterable(part(running) for part in self._parts.held_blocks))
        self._kv.check(running, blocks)
