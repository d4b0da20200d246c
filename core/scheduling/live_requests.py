"""The unfinished requests: which of them run, wait or load, and what each transition gives back."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import Any

from ..cache.kv_manager import KVCacheManager
from ..outputs import EngineStats, FinishReason, KVCompressionUsage
from ..request import Request, Status, Update
from .allowances import Allowance
from .compression import CacheCompression
from .drafts import DraftBooks
from .kv_transfers import KVTransfers
from .pipeline.lanes import Lanes
from .queues.decode_rows import DecodeRows
from .queues.queue import RequestQueue


class LiveRequests:
    """Every unfinished request stands in one queue; one that runs has a slot."""

    def __init__(
        self,
        num_slots: int,
        kv: KVCacheManager,
        stats: EngineStats,
        *,
        transfers: KVTransfers | None,
        compression: CacheCompression | None,
        allowances: Sequence[Allowance] = (),
        drafts: DraftBooks | None = None,
        lanes: Lanes | None = None,
        decoding: DecodeRows | None = None,
    ) -> None:
        """allowances: what a request has while it runs, besides slot and blocks. lanes: with
        stages. decoding: where a decoding request gets one token with every plan."""
        self.by_id: dict[str, Request] = {}
        self.running = RequestQueue()
        self.waiting = RequestQueue()
        self.loading = RequestQueue()
        """Requests that wait for a load of the KV connector."""
        self._num_slots = num_slots
        self._kv = kv
        self._stats = stats
        self._transfers = transfers
        self._compression = compression
        self._allowances = allowances
        self._drafts = drafts
        self._lanes = lanes
        self._decoding = decoding
        self._arrivals = count()
        self._free_slots = list(range(num_slots))
        self._released: list[int] = []

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    # ------------------------------------------------------------ transitions

    def add(self, request: Request, key: tuple[Any, ...]) -> None:
        """Let a new request wait, in the order of its policy's key."""
        request.order = (*key, next(self._arrivals))
        self.by_id[request.request_id] = request
        self.waiting.add(request)

    def run(self, request: Request) -> None:
        """Give a request a free slot. The caller removes it from `waiting`."""
        request.slot = heapq.heappop(self._free_slots)
        request.status = Status.RUNNING
        self.running.add(request)
        if self._decoding is not None:
            self._decoding.add(request)

    def preempt(self, request: Request) -> None:
        """Return a running request to the queue, to be computed again; drop results in flight."""
        self._leave_slot(request)
        if self._transfers is not None:
            self._transfers.let_prompt_go(request)
        self._kv.free(request)
        request.external_end = None
        request.status = Status.PREEMPTED
        request.epoch += 1
        request.num_preempted_tokens = min(request.num_computed_tokens, request.num_known_tokens)
        request.num_computed_tokens = 0
        request.num_tokens = request.num_known_tokens
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        self.waiting.add(request)

    def count_restart(self, request: Request) -> None:
        """Count what a preempted request finds of its tokens, now that it has blocks again."""
        num_restored = min(request.num_computed_tokens, request.num_preempted_tokens)
        self._stats.preempted_tokens_restored += num_restored
        self._stats.preempted_tokens_recomputed += request.num_preempted_tokens - num_restored
        request.num_preempted_tokens = 0

    def wait_again(self, request: Request) -> None:
        """Return a request to the queue whose load has ended."""
        self.loading.remove(request)
        request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
        self.waiting.add(request)

    def end(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a request in any state."""
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
        if self._transfers is not None:
            self._transfers.finish_request(request)
        self._kv.free(request)
        request.status = Status.FINISHED
        request.epoch += 1
        del self.by_id[request.request_id]

    def fail(self, request: Request, error: str, param: str | None = None) -> Update:
        """End a request whose blocks may not hold what their tokens say.

        param: the field of the request that is at fault; None: it is not the request's.
        """
        self._kv.invalidate(request)
        for allowance in self._allowances:
            allowance.invalidate(request)
        self.end(request, "error")
        return Update(request, [], finished=True, error=error, error_param=param)

    def _leave_slot(self, request: Request) -> None:
        self.running.remove(request)
        if self._decoding is not None:
            self._decoding.remove(request)
        if self._compression is not None:
            self._compression.withdraw(request.slot)
        for allowance in self._allowances:
            allowance.give_back(request)
        if self._drafts is not None:
            self._drafts.withdraw(request)
        if self._lanes is not None:
            self._lanes.leave(request)
        heapq.heappush(self._free_slots, request.slot)
        self._released.append(request.slot)
        request.slot = -1

    def take_released(self) -> list[int]:
        """Return the slots that requests left since the last call."""
        released, self._released = self._released, []
        return released

    # ------------------------------------------------------------ looking in

    def check(self) -> None:
        """Raise AssertionError if queues, slots and blocks contradict each other."""
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
            assert r.num_unverified_tokens == 0, f"{r.request_id} waits, but counts drafts"
        if self._lanes is not None:
            self._lanes.check(running)
        blocks = [block for each in self._allowances for block in each.held_blocks(running)]
        if self._transfers is not None:
            self._transfers.check({r.request_id for r in loading})
            blocks += self._transfers.held_blocks
        self._kv.check(running, blocks)
