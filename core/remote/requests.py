"""States of requests at the other end of a connection."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from ..engine.core_client import S
from ..engine.output_processor import RequestTracker, State
from ..engine.plugin_events import PluginEvents
from ..engine.pooling import PoolingState
from ..engine.request_state import Completion, RequestState, output_failure
from ..request import Request, RequestSpec, Update
from .channel import Channel
from .frames import Abort, AddRequest, Change, Stop, ToFront, Tokens
from .pending_calls import PendingCalls

logger = logging.getLogger("jackfield.remote")


def _failed(reply: asyncio.Future[Any]) -> bool:
    return reply.done() and (reply.cancelled() or reply.exception() is not None)


def _ignore(state: State) -> None:
    """Do nothing: in place of a listener."""


class RemoteRequests:
    """One connection's requests; the tracker may have others'."""

    events: PluginEvents

    def __init__(
        self,
        tracker: RequestTracker,
        channel: Channel[ToFront],
        calls: PendingCalls,
        *,
        begun: Callable[[State], None] = _ignore,
        ended: Callable[[State], None] = _ignore,
        where: str = "",
    ) -> None:
        """begun: called at a request's first tokens; ended: when forgotten. where: prefix of the
        other end's errors.
        """
        self._tracker = tracker
        self._channel = channel
        self._calls = calls
        self._begun = begun
        self._ended = ended
        self._where = where
        self._open: dict[int, tuple[State, Any]] = {}
        """Number → request and completion, until it ends."""
        self._numbers: dict[str, int] = {}
        """Request id → first completion's number."""
        self._stops: dict[int, str] = {}
        """Completions ended here by a stop string, but not yet there."""
        self._silent: dict[str, tuple[RequestSpec, asyncio.Future[Any]]] = {}
        """Request id → spec and reply's future, before output."""

    async def add(self, spec: RequestSpec, make_state: Callable[[list[Request]], S]) -> S:
        """Send a request, and wait until scheduled.

        Raises the other end's error, EngineStopped, and InvalidRequest for a used id.
        """
        state = make_state(spec.requests())
        # Registered before it is sent: its tokens may come with the engine's reply.
        self._tracker.add_state(state)
        try:
            await self._send(spec, state)
        except asyncio.CancelledError:
            self.abort(state)
            raise
        except BaseException:
            self._forget(state)
            raise
        return state

    def _send(self, spec: RequestSpec, state: State) -> asyncio.Future[Any]:
        number = self._calls.numbers(len(state.requests))
        self._numbers[state.request_id] = number
        for index, completion in enumerate(state.completions):
            self._open[number + index] = (state, completion)
        reply = self._calls.begin(number, AddRequest(number, spec))
        self._silent[state.request_id] = (spec, reply)
        return reply

    def adopt(self, spec: RequestSpec, state: State) -> asyncio.Future[None]:
        """Send a tracked request of another connection. Return the reply's future; after an error
        the request is released or ended.

        Raises EngineStopped without adopting it.
        """
        try:
            return self._send(spec, state)
        except BaseException:
            self.release(state)
            raise

    def hand_over(self, take: Callable[[State, RequestSpec], bool]) -> None:
        """Offer accepted requests without output to `take`, in order of arrival; True removes them
        here.
        """
        for request_id, (spec, reply) in list(self._silent.items()):
            if _failed(reply):
                continue  # Whoever waits for the reply gets the error.
            state = self._tracker.states[request_id]
            if take(state, spec):
                self.release(state)

    def release(self, state: State) -> None:
        first = self._numbers.pop(state.request_id)
        for number in range(first, first + len(state.completions)):
            self._open.pop(number, None)
            self._stops.pop(number, None)
        self._silent.pop(state.request_id, None)

    def abort(self, state: State) -> None:
        if state.request_id not in self._numbers or state.finished:
            return
        self._abort_rest(state)
        for completion in state.completions:
            completion.set_finished("abort", None)
        self._end(state)

    def _abort_rest(self, state: State) -> None:
        """Abort unfinished completions at the other end."""
        first = self._numbers[state.request_id]
        numbers = range(first, first + len(state.completions))
        self._channel.send(Abort([number for number in numbers if number in self._open]))

    def finish_completion(self, state: State, index: int, stop: str) -> None:
        first = self._numbers.get(state.request_id)
        if first is not None and first + index in self._open:
            self._stop(first + index, stop)

    def fail(self, error: str) -> int:
        """End all with an error, except those awaiting an error reply; return how many."""
        running = [
            request_id
            for request_id in self._numbers
            if request_id not in self._silent or not _failed(self._silent[request_id][1])
        ]
        for request_id in running:
            self.fail_request(self._tracker.states[request_id], error)
        return len(running)

    def fail_request(self, state: State, error: str) -> None:
        state.error = state.error or error
        for completion in state.completions:
            completion.set_finished("error", None)
        self._end(state)

    def __len__(self) -> int:
        return len(self._numbers)

    def check_idle(self) -> None:
        assert not self._numbers, f"live requests: {list(self._numbers)}"
        assert not self._open and not self._stops, "completions without a request"
        assert not self._silent, "requests that were sent and forgotten"

    def _forget(self, state: State) -> None:
        if state.request_id not in self._numbers:
            return
        self.release(state)
        self._tracker.remove_state(state)
        self._ended(state)

    def _end(self, state: State) -> None:
        """Finish a request whose completions have ended."""
        self._forget(state)
        state.mark_finished()
        try:
            self.events.request_finished(state)
        except Exception:
            logger.exception("the end of request %s could not be announced", state.request_id)
        self._tracker.notify(state)

    # ------------------------------------------------------------ received frames

    def take_tokens(self, tokens: Tokens) -> None:
        """Apply a step's tokens, and notify streams."""
        now = time.monotonic()
        streams = self._open
        for number, token_id in zip(tokens.numbers, tokens.token_ids, strict=True):
            entry = streams.get(number)
            if entry is None or number in self._stops:
                continue  # It has ended here, and the engine is being notified.
            state, completion = entry
            state.timings.last_token = now
            try:
                stop = completion.apply_tokens((token_id,))
            except Exception as error:
                self._fail_output(state, error)
                continue
            if stop is not None:
                self._stop(number, stop)
            self._tracker.notify(state)
        for change in tokens.changes:
            entry = streams.get(change.number)
            if entry is None:
                continue
            state, completion = entry
            self._silent.pop(state.request_id, None)
            if change.error is not None:
                change.error = f"{self._where}{change.error}"
            try:
                if isinstance(state, PoolingState):
                    self._take_pooled(state, change)
                else:
                    self._change(state, completion, change, now)
            except Exception as error:
                self._fail_output(state, error)

    def _fail_output(self, state: State, error: Exception) -> None:
        """End a request whose output failed, at both ends."""
        logger.error("the output of request %s failed", state.request_id, exc_info=error)
        if state.request_id in self._numbers:
            self._abort_rest(state)
            self.fail_request(state, output_failure(error))

    def _stop(self, number: int, stop: str) -> None:
        self._stops[number] = stop
        self._channel.send(Stop(number, stop))

    def _change(
        self, state: RequestState, completion: Completion, change: Change, now: float
    ) -> None:
        number, request = change.number, completion.request
        finished = change.finish_reason is not None
        if change.num_cached_tokens is not None:
            request.num_cached_tokens = change.num_cached_tokens
            request.first_scheduled = change.first_scheduled
            request.num_preemptions = change.num_preemptions
            self._begun(state)
        if finished:
            request.finish_reason = change.finish_reason
            request.stop_reason = change.stop_reason
            request.kv_transfer_params = change.kv_transfer_params
            request.compression_usage = change.compression_usage
            request.draft_usage = change.draft_usage
            request.weight_versions = change.weight_versions
            if change.routed_experts is not None:
                request.routed_experts = change.routed_experts.array()
            if change.error is not None:
                state.error, state.error_param = change.error, change.error_param
        if change.prompt_logprobs:
            state.add_prompt_logprobs(change.prompt_logprobs)
        stop = self._stops.get(number)
        if change.token_ids and stop is None:
            state.mark_tokens(now)
            stop = completion.apply(
                Update(request, change.token_ids, change.logprobs or None, finished=finished)
            )
            if stop is not None and not finished:
                self._stop(number, stop)
        if finished:
            if stop is not None and change.finish_reason != "error":
                completion.set_finished("stop", stop)
            else:
                completion.set_finished(change.finish_reason or "abort", change.stop_reason)
            del self._open[number]
            self._stops.pop(number, None)
        if state.finished:
            self._end(state)
        else:
            self._tracker.notify(state)

    def _take_pooled(self, state: PoolingState, change: Change) -> None:
        request = state.requests[0]
        request.num_cached_tokens = change.num_cached_tokens or 0
        request.first_scheduled = change.first_scheduled
        request.num_preemptions = change.num_preemptions
        state.pooled.row, state.error = change.pooled, change.error
        state.pooled.set_finished(change.finish_reason or "abort")
        self._end(state)
