"""Tracks live requests, applies scheduler updates to them, and notifies their streams."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TypeAlias

from ..errors import EngineOverloaded, EngineStopped, InvalidRequest, shown
from ..metrics.metrics import EngineMetrics
from ..outputs import FinishReason
from ..request import Update
from ..scheduling.scheduler import Scheduler
from ..tenancy import unscoped_id
from .plugin_events import PluginEvents
from .pooling import Pooled, PoolingState
from .request_state import Completion, RequestState, output_failure

logger = logging.getLogger("jackfield.engine")
State: TypeAlias = RequestState | PoolingState


class RequestTracker:
    """Unfinished requests by the caller's id. Notifies callers of output."""

    def __init__(self) -> None:
        self.states: dict[str, State] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self.accepting = False
        """Set at the engine's start; cleared when it drains, stops or dies."""
        self.dead_reason: str | None = None
        """Why no request can be served."""
        self.most_logprobs: int | None = None
        """Log-probabilities that live requests may get in all, unless one alone gets more."""
        self._num_logprobs = 0
        """Those that they may get."""
        self._notified: list[RequestState] = []
        """Requests with listeners to call."""

    @property
    def healthy(self) -> bool:
        return self.accepting and self.dead_reason is None

    def check_accepting(self) -> None:
        if self.dead_reason is not None:
            raise EngineStopped(f"the engine died: {self.dead_reason}")
        if not self.accepting:
            raise EngineStopped("the engine is not accepting requests: it is stopping or stopped")

    def check_free(self, request_id: str) -> None:
        if request_id in self.states:
            raise InvalidRequest(
                f"request_id: {shown(unscoped_id(request_id))} is in use by a running request; "
                "choose another one",
                param="request_id",
            )

    def add_state(self, state: State) -> None:
        """Register a request. Raises InvalidRequest for a used id, and EngineOverloaded beside
        others with too many log-probabilities."""
        self.check_free(state.request_id)
        before, more, most = self._num_logprobs, state.num_logprobs, self.most_logprobs
        if before and more and most is not None and before + more > most:
            raise EngineOverloaded(
                f"running requests may get {before} log-probabilities and this one {more}, "
                f"{most} in all; try again later"
            )
        self._num_logprobs += more
        self.states[state.request_id] = state
        self.idle.clear()

    def remove_state(self, state: State) -> None:
        del self.states[state.request_id]
        self._num_logprobs -= state.num_logprobs
        if not self.states:
            self.idle.set()

    def notify(self, state: State) -> None:
        """Wake a request's task, or schedule its listener; not before the end of a request whose
        caller gets nothing until then.
        """
        if state.only_final and not state.finished:
            return
        if state.listener is None:
            state.changed.set()
            return
        if not self._notified:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._notified.append(state)

    def _deliver(self) -> None:
        """Call the listeners of requests with new output."""
        states, self._notified = self._notified, []
        for state in states:
            if state.listener is not None:
                try:
                    state.listener()
                except Exception:
                    logger.exception("the listener of request %s failed", state.request_id)


class OutputProcessor:
    def __init__(
        self,
        requests: RequestTracker,
        scheduler: Scheduler,
        metrics: EngineMetrics,
        events: PluginEvents,
    ) -> None:
        self.requests = requests
        self.scheduler = scheduler
        self.metrics = metrics
        self.events = events
        self.finished_counts: dict[FinishReason, int] = {}
        """Ended completions by reason."""
        self._owners: dict[str, tuple[State, int]] = {}
        """Scheduler request id → its state and completion index."""

    def enter_request(self, state: State) -> None:
        """Register a request with the scheduler, or leave nothing.

        Raises InvalidRequest for a used id, RequestFailed if the schedule policy fails.
        """
        self.requests.add_state(state)
        try:
            self.scheduler.add_requests(*state.requests)
        except BaseException:
            self.requests.remove_state(state)
            raise
        for index, request in enumerate(state.requests):
            self._owners[request.request_id] = (state, index)

    def publish(self, updates: list[Update]) -> None:
        if not updates:
            return
        now = time.monotonic()
        gaps: dict[float, int] = {}
        """Seconds between tokens → number of tokens, mostly common to streams."""
        owners = self._owners
        # Prompts are the last rows: their first tokens go out before other rows' next ones.
        for update in reversed(updates):
            owner = owners.get(update.request.request_id)
            if owner is None:
                continue
            try:
                self._publish(*owner, update, now, gaps)
            except Exception as error:
                self._fail_request(owner[0], error)
        try:
            for gap, count in gaps.items():
                self.metrics.observe_inter_token(gap, count)
        except Exception:
            logger.exception("the times between tokens could not be counted")

    def _publish(
        self, state: State, index: int, update: Update, now: float, gaps: dict[float, int]
    ) -> None:
        """Apply an update to completion `index`; errors end the request."""
        if isinstance(state, PoolingState):
            self._publish_pooled(state, update)
            return
        request, completion = update.request, state.completions[index]
        if update.prompt_logprobs and index == 0:
            state.add_prompt_logprobs(update.prompt_logprobs)
        if update.new_token_ids:
            count = len(update.new_token_ids)
            before = state.mark_tokens(now)
            if before is None:
                self.metrics.observe_first_token(now - state.timings.arrival)
            else:
                gap = (now - before) / count
                gaps[gap] = gaps.get(gap, 0) + count
            stop = completion.apply(update)
            if stop is not None:
                self.scheduler.finish_request(request.request_id, "stop", stop)
                completion.set_finished("stop", stop)
        if update.error is not None:
            state.error, state.error_param = update.error, update.error_param
        if update.finished:
            assert request.finish_reason is not None
            completion.set_finished(request.finish_reason, request.stop_reason)
        self.requests.notify(state)
        if completion.finish_reason is not None:
            self._completion_ended(state, request.request_id)

    def finish_completion(self, state: RequestState, index: int, stop: str) -> None:
        completion = state.completions[index]
        if completion.finish_reason is None:
            request_id = state.requests[index].request_id
            self.scheduler.finish_request(request_id, "stop", stop)
            completion.set_finished("stop", stop)
            self._completion_ended(state, request_id)

    def abort_request(self, state: State) -> None:
        self._end_request(state, "abort")

    def _fail_request(self, state: State, error: Exception) -> None:
        logger.error("the output of request %s failed", state.request_id, exc_info=error)
        state.error = state.error or output_failure(error)
        self._end_request(state, "error")

    def _end_request(self, state: State, reason: FinishReason) -> None:
        completions: Sequence[Completion | Pooled] = state.completions
        for request, completion in zip(state.requests, completions, strict=True):
            if request.request_id in self._owners:
                self.scheduler.finish_request(request.request_id, reason)
                completion.set_finished(reason, None)
                self._completion_ended(state, request.request_id)
        self.requests.notify(state)

    def _publish_pooled(self, state: PoolingState, update: Update) -> None:
        state.pooled.row, state.error = update.pooled, update.error
        state.pooled.set_finished(update.request.finish_reason or "stop")
        self.requests.notify(state)
        self._completion_ended(state, update.request.request_id)

    def _completion_ended(self, state: State, scheduler_id: str) -> None:
        """Count a completion's end, and the request's with the last."""
        owner = self._owners.pop(scheduler_id, None)
        if owner is not None:
            reason = state.completions[owner[1]].finish_reason or "abort"
            self.finished_counts[reason] = self.finished_counts.get(reason, 0) + 1
        if not state.finished or state.request_id not in self.requests.states:
            return
        self.requests.remove_state(state)
        state.mark_finished()
        try:
            self._observe_end(state)
        except Exception:
            logger.exception("the end of request %s could not be counted", state.request_id)

    def _observe_end(self, state: State) -> None:
        if isinstance(state, PoolingState):
            request = state.requests[0]
            self.metrics.observe_pooled(
                request.num_prompt_tokens, state.timings, request.num_cached_tokens
            )
        else:
            num_loaded = state.requests[0].num_loaded_tokens
            self.metrics.observe_finished(state.final_output(), state.params, num_loaded)
        self.events.request_finished(state)

    def check_idle(self) -> None:
        assert not self.requests.states, f"live requests: {list(self.requests.states)}"
        assert self.requests.idle.is_set(), "no request is live, but the tracker is not idle"
        assert not self._owners, f"scheduler requests without an end: {list(self._owners)}"
        scheduled = list(self.scheduler.requests.by_id)
        assert not scheduled, f"still scheduled: {scheduled}"
        self.scheduler.check_invariants()
