"""Requests under way: whose each is, what a step brought them, and who is told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..errors import InvalidRequest, shown
from ..observe.metrics import EngineMetrics
from ..scheduling.request import Update
from ..scheduling.scheduler import Scheduler
from ..types import FinishReason, PoolingRequestOutput, RequestOutput
from .output import Completion, RequestState
from .pooling import Pooled, PoolingState

logger = logging.getLogger("jackfield.engine")
State: TypeAlias = RequestState | PoolingState
Finished: TypeAlias = Callable[[RequestOutput | PoolingRequestOutput], None]


class Underway:
    """Requests that have not ended, and telling their callers what is new."""

    def __init__(self) -> None:
        self.states: dict[str, State] = {}
        """By the caller's request id."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()
        self._news: list[RequestState] = []
        """Whose listeners are to be called."""

    def add(self, state: State) -> None:
        """It begins. Raises InvalidRequest while another one has its id."""
        self.check_free(state.request_id)
        self.states[state.request_id] = state
        self.idle.clear()

    def check_free(self, request_id: str) -> None:
        """Raises InvalidRequest while a request has this id."""
        if request_id in self.states:
            raise InvalidRequest(
                f"request_id: {shown(request_id)} is in use by a running request",
                param="request_id",
            )

    def remove(self, state: State) -> None:
        """It has ended."""
        del self.states[state.request_id]
        if not self.states:
            self.idle.set()

    def tell(self, state: State) -> None:
        """Its caller has news: wake who waits, or note whom to call."""
        if isinstance(state, PoolingState) or state.listener is None:
            state.changed.set()
            return
        if not self._news:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._news.append(state)

    def _deliver(self) -> None:
        """Call all listeners that a step has news for, in one turn of the loop."""
        news, self._news = self._news, []
        for state in news:
            if state.listener is not None:
                try:
                    state.listener()
                except Exception:
                    logger.exception("the listener of request %s failed", state.request_id)


class Publisher:
    """Enters requests into the scheduler, and gives its updates to their streams.

    `finished` is called with the last output of each request; None: nobody listens.
    """

    def __init__(
        self,
        underway: Underway,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        finished: Finished | None,
    ) -> None:
        self.underway = underway
        self.scheduler = scheduler
        self.metrics = metrics
        self.finished = finished
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.finished_counts: dict[str, int] = {}
        """By finish reason."""
        self._owners: dict[str, tuple[State, int]] = {}
        """Scheduler request id → its state and completion index."""

    def enter(self, state: State) -> None:
        """Give its requests to the scheduler. Whatever this raises, nothing is left of them.

        Raises InvalidRequest when they never fit or their id is in use, and RequestFailed where
        the schedule policy fails on them.
        """
        if (reason := self.scheduler.unfit_reason(state.requests[0])) is not None:
            raise InvalidRequest(f"prompt: {reason}", param="prompt")
        self.underway.check_free(state.request_id)
        self.scheduler.add(*state.requests)
        self.underway.add(state)
        for index, request in enumerate(state.requests):
            self._owners[request.request_id] = (state, index)
        self.num_prompt_tokens += len(state.requests[0].prompt_token_ids)

    def publish(self, updates: list[Update]) -> None:
        """Give a step's tokens to their streams."""
        if not updates:
            return
        now = time.monotonic()
        gaps: dict[float, int] = {}
        """Seconds between tokens → how many came so: streams in step have one number."""
        for update in updates:
            request = update.request
            owner = self._owners.get(request.request_id)
            if owner is None:
                continue
            state, index = owner
            if isinstance(state, PoolingState):
                self._publish_pooled(state, update)
                continue
            completion = state.completions[index]
            if update.prompt_logprobs and index == 0:
                state.add_prompt_logprobs(update.prompt_logprobs)
            if update.new_token_ids:
                count = len(update.new_token_ids)
                self.num_generation_tokens += count
                before = state.mark_tokens(now)
                if before is None:
                    self.metrics.observe_first_token(now - state.timings.arrival)
                else:
                    gap = (now - before) / count
                    gaps[gap] = gaps.get(gap, 0) + count
                stop = completion.apply(update)
                if stop is not None:
                    self.scheduler.finish(request.request_id, "stop", stop)
                    completion.finish("stop", stop)
            if update.error is not None:
                state.error = update.error
            if update.finished:
                assert request.finish_reason is not None
                completion.finish(request.finish_reason, request.stop_reason)
            self.underway.tell(state)
            if completion.finish_reason is not None:
                self.ended(state, request.request_id)
        for gap, count in gaps.items():
            self.metrics.observe_inter_token(gap, count)

    def _publish_pooled(self, state: PoolingState, update: Update) -> None:
        state.pooled.row, state.error = update.pooled, update.error
        state.pooled.finish(update.request.finish_reason or "stop")
        self.underway.tell(state)
        self.ended(state, update.request.request_id)

    def ended(self, state: State, scheduler_id: str) -> None:
        """One completion ended; perhaps the request did."""
        owner = self._owners.pop(scheduler_id, None)
        if owner is not None:
            reason: FinishReason = state.completions[owner[1]].finish_reason or "abort"
            self.finished_counts[reason] = self.finished_counts.get(reason, 0) + 1
        if not state.finished or state.request_id not in self.underway.states:
            return
        self.underway.remove(state)
        state.mark_finished()
        if isinstance(state, PoolingState):
            reason = state.pooled.finish_reason or "abort"
            self.metrics.observe_pooled(state.requests[0].num_prompt_tokens, state.timings, reason)
            if self.finished is not None and state.pooled.row is not None:
                self.finished(state.output())
        else:
            output = state.peek()
            self.metrics.observe_finished(output, state.params)
            if self.finished is not None:
                self.finished(output)

    def abort(self, state: State) -> None:
        """End what is left of a request, at once: its blocks are free when this returns."""
        completions: Sequence[Completion | Pooled] = state.completions
        for request, completion in zip(state.requests, completions, strict=True):
            if completion.finish_reason is None:
                self.scheduler.finish(request.request_id, "abort")
                completion.finish("abort", None)
                self.ended(state, request.request_id)
        self.underway.tell(state)
