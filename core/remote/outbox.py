"""What the engine keeps of a front end's requests: it counts their tokens and sends them on.

Text, stop strings and parsing are the front end's. One `Outbox` a connection gathers what a step
brings to all of its requests, and sends it as one frame once the next step is on its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeAlias

from ..engine.output import Completion, RequestState
from ..engine.pooling import Pooled, PoolingState
from ..scheduling.request import Request, Update
from ..types import FinishReason, SamplingParams, TokenLogprobs
from .channel import Channel
from .frames import Change, ToEngine, Tokens, TooLarge

logger = logging.getLogger("jackfield.remote")


class Outbox:
    """News for one front end. While it does not read, its news grows together and nothing is sent:
    a slow front end costs the tokens that it has not read, and no more."""

    def __init__(self, channel: Channel[ToEngine], drop: Callable[[Forwarded], None]) -> None:
        """drop: ends a request of which nothing more is to be told."""
        self.open: dict[int, Forwarded] = {}
        """By completion: the requests of those that have not ended."""
        self._channel = channel
        self._drop = drop
        self._numbers: list[int] = []
        self._token_ids: list[int] = []
        self._changes: dict[int, Change] = {}
        """By completion: once there is one, its further tokens go there, too."""
        self._scheduled = False

    def add(self, number: int, token_ids: list[int]) -> None:
        """Tokens of a completion that bring nothing else."""
        change = self._changes.get(number)
        if change is not None:
            change.token_ids += token_ids
            return
        if not self._numbers:
            self._schedule()
        for token_id in token_ids:
            self._numbers.append(number)
            self._token_ids.append(token_id)

    def change(self, number: int) -> Change:
        """What is to be told of a completion in the next frame."""
        change = self._changes.get(number)
        if change is None:
            change = self._changes[number] = Change(number=number)
            self._schedule()
        return change

    def flush(self) -> None:
        """Send what there is, unless the front end is behind."""
        self._scheduled = False
        if self._channel.paused or not (self._numbers or self._changes):
            return
        frame = Tokens(self._numbers, self._token_ids, list(self._changes.values()))
        self._numbers, self._token_ids, self._changes = [], [], {}
        try:
            self._channel.send(frame)
        except (TooLarge, ValueError) as error:
            self._one_by_one(frame, error)

    def _one_by_one(self, frame: Tokens, error: Exception) -> None:
        """Find which change cannot be sent, and end its request in its place."""
        logger.warning("a step's news is sent in pieces: %s", error)
        try:
            self._channel.send(Tokens(frame.numbers, frame.token_ids))
            for change in frame.changes:
                try:
                    self._channel.send(Tokens([], [], [change]))
                except (TooLarge, ValueError) as wrong:
                    self._channel.send(Tokens([], [], self._failed(change.number, str(wrong))))
        except (TooLarge, ValueError):
            logger.exception("a front end is too far behind and is let go")
            self._channel.abort()

    def _failed(self, number: int, error: str) -> list[Change]:
        """End a completion with an error, and those of the same request that have not ended."""
        state = self.open.get(number)
        numbers = {number, *(one for one, its in self.open.items() if its is state)}
        if state is not None:
            self._drop(state)
        return [Change(number=one, finish_reason="error", error=error) for one in sorted(numbers)]

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)


class ForwardedCompletion(Completion):
    """A completion whose tokens go to a front end as they come."""

    def __init__(self, state: ForwardedState, index: int) -> None:
        super().__init__(index, state.requests[index], None)
        self.token_ids = self.request.output_token_ids  # The scheduler's own, for the counts.
        self.logprobs = None
        self.state = state
        self.number = state.number + index
        self._begun = False

    def apply(self, update: Update) -> str | None:
        """Never finds a stop string: that is the front end's."""
        state = self.state
        if state.muted or self.finish_reason is not None:
            return None
        if self._begun and update.logprobs is None and not update.finished:
            state.outbox.add(self.number, update.new_token_ids)
            return None
        change = state.outbox.change(self.number)
        change.token_ids += update.new_token_ids
        if update.logprobs is not None:
            change.logprobs += update.logprobs
        if not self._begun:
            self._begun = True
            change.num_cached_tokens = self.request.num_cached_tokens
            change.first_scheduled = self.request.first_scheduled
        return None

    def finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """No more tokens, and the front end is told."""
        if self.finish_reason is not None:
            return
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.state.outbox.open.pop(self.number, None)
        if not self.state.muted:
            change = _end(self.state, self.request, self.number, reason)
            change.stop_reason = stop_reason
            change.kv_transfer_params = self.request.kv_transfer_params


class ForwardedState(RequestState):
    """A front end's request for tokens."""

    def __init__(
        self,
        request_id: str,
        requests: list[Request],
        params: SamplingParams,
        number: int,
        outbox: Outbox,
    ) -> None:
        """number: of the first completion, in the front end's count."""
        super().__init__(request_id, None, requests, params, None)
        self.number = number
        self.outbox = outbox
        self.muted = False
        """The front end does not want to hear of it any more."""
        self.completions = [ForwardedCompletion(self, index) for index in range(len(requests))]

    def add_prompt_logprobs(self, positions: list[TokenLogprobs]) -> None:
        """Send them on."""
        if not self.muted:
            self.outbox.change(self.number).prompt_logprobs += positions


class ForwardedPooled(Pooled):
    """The result of a pooling request, on its way to a front end."""

    def __init__(self, state: ForwardedPoolingState) -> None:
        super().__init__()
        self.state = state

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """It is there, or will not come."""
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        self.state.outbox.open.pop(self.state.number, None)
        if not self.state.muted:
            _end(self.state, self.state.requests[0], self.state.number, reason).pooled = self.row


class ForwardedPoolingState(PoolingState):
    """A front end's pooling request."""

    def __init__(self, request: Request, number: int, outbox: Outbox) -> None:
        super().__init__(None, request)
        self.number = number
        self.outbox = outbox
        self.muted = False
        """As `ForwardedState.muted`."""
        self.pooled = ForwardedPooled(self)
        self.completions = [self.pooled]


Forwarded: TypeAlias = ForwardedState | ForwardedPoolingState


def _end(state: Forwarded, request: Request, number: int, reason: FinishReason) -> Change:
    """The change that ends a completion."""
    change = state.outbox.change(number)
    change.finish_reason = reason
    change.error = state.error
    change.num_cached_tokens = request.num_cached_tokens
    change.first_scheduled = request.first_scheduled
    change.num_preemptions = request.num_preemptions
    return change
