"""A front end's requests in the engine's process, and their outbox.

The front end handles texts. An `Outbox` per connection collects a step's updates into one frame,
sent after the next step is submitted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..engine.pooling import Pooled, PoolingState
from ..engine.request_state import Completion, RequestState
from ..outputs import FinishReason
from ..parts.routed_experts import RoutedArray
from ..request import Request, Update
from ..step import TokenLogprobs
from .channel import Channel
from .frames import Change, ToEngine, Tokens, TooLarge

logger = logging.getLogger("jackfield.remote")


class Outbox:
    """Collects a front end's updates.

    For a slow front end updates are merged, so it costs only its unread tokens' memory.
    """

    def __init__(self, channel: Channel[ToEngine], drop: Callable[[Forwarded], None]) -> None:
        """drop: aborts a request without further output."""
        self.open: dict[int, Forwarded] = {}
        """Completion number → request, until it ends."""
        self._channel = channel
        self._drop = drop
        self._numbers: list[int] = []
        self._token_ids: list[int] = []
        self._changes: dict[int, Change] = {}
        """Completion number → its change in the next frame, which takes further tokens, too."""
        self._scheduled = False

    def add_tokens(self, number: int, token_ids: Sequence[int]) -> None:
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
        """Return a completion's change in the next frame."""
        change = self._changes.get(number)
        if change is None:
            change = self._changes[number] = Change(number=number)
            self._schedule()
        return change

    def flush(self) -> None:
        """Send collected updates, unless the front end is slow."""
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
        """Send changes singly, failing requests of those that cannot be sent."""
        logger.warning("a step's updates are sent in pieces: %s", error)
        try:
            self._channel.send(Tokens(frame.numbers, frame.token_ids))
            for change in frame.changes:
                try:
                    self._channel.send(Tokens([], [], [change]))
                except (TooLarge, ValueError) as wrong:
                    self._channel.send(Tokens([], [], self._failed(change.number, str(wrong))))
        except (TooLarge, ValueError):
            logger.exception("a front end reads too slowly and is disconnected")
            self._channel.abort()

    def _failed(self, number: int, error: str) -> list[Change]:
        """Return changes that end a request's completions with an error."""
        state = self.open.get(number)
        numbers = {number, *(other for other, owner in self.open.items() if owner is state)}
        if state is not None:
            self._drop(state)
        return [Change(number=n, finish_reason="error", error=error) for n in sorted(numbers)]

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)


class ForwardedCompletion(Completion):
    def __init__(self, state: ForwardedState, index: int) -> None:
        super().__init__(index, state.requests[index], None)
        self.token_ids = self.request.output_token_ids  # The scheduler's list, for the counts.
        self.logprobs = None
        self.state = state
        self.number = state.number + index
        self._has_tokens = False

    def apply(self, update: Update) -> str | None:
        """Forward new tokens. Returns None: the front end finds stop strings."""
        state = self.state
        if state.muted or self.finish_reason is not None:
            return None
        if self._has_tokens and update.logprobs is None and not update.finished:
            state.outbox.add_tokens(self.number, update.new_token_ids)
            return None
        change = state.outbox.change(self.number)
        change.token_ids += update.new_token_ids
        if update.logprobs is not None:
            change.logprobs += update.logprobs
        if not self._has_tokens:
            self._has_tokens = True
            change.num_cached_tokens = self.request.num_cached_tokens
            change.first_scheduled = self.request.first_scheduled
        return None

    def apply_tokens(self, new_token_ids: Sequence[int]) -> str | None:
        """Forward tokens of an engine in another process."""
        if not self.state.muted and self.finish_reason is None:
            self.state.outbox.add_tokens(self.number, new_token_ids)
        return None

    def set_finished(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Record the reason, once, and notify the front end."""
        if self.finish_reason is not None:
            return
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.state.outbox.open.pop(self.number, None)
        if not self.state.muted:
            change = _end(self.state, self.request, self.number, reason)
            change.stop_reason = stop_reason
            change.kv_transfer_params = self.request.kv_transfer_params
            change.compression_usage = self.request.compression_usage
            change.draft_usage = self.request.draft_usage
            change.weight_versions = self.request.weight_versions
            change.routed_experts = RoutedArray.of(self.request.routed_experts)


class ForwardedState(RequestState):
    announced = False

    def __init__(
        self,
        requests: list[Request],
        number: int,
        outbox: Outbox,
    ) -> None:
        """number: the first completion's."""
        super().__init__(None, requests, None)
        self.number = number
        self.outbox = outbox
        self.muted = False
        """Dropped by the front end."""
        self.completions = [ForwardedCompletion(self, index) for index in range(len(requests))]

    def add_prompt_logprobs(self, positions: list[TokenLogprobs]) -> None:
        if not self.muted:
            self.outbox.change(self.number).prompt_logprobs += positions


class ForwardedPooled(Pooled):
    def __init__(self, state: ForwardedPoolingState) -> None:
        super().__init__()
        self.state = state

    def set_finished(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Record the reason, once, and send the result."""
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        self.state.outbox.open.pop(self.state.number, None)
        if not self.state.muted:
            _end(self.state, self.state.requests[0], self.state.number, reason).pooled = self.row


class ForwardedPoolingState(PoolingState):
    announced = False

    def __init__(self, request: Request, number: int, outbox: Outbox) -> None:
        super().__init__(None, request)
        self.number = number
        self.outbox = outbox
        self.muted = False
        self.pooled = ForwardedPooled(self)
        self.completions = [self.pooled]


Forwarded: TypeAlias = ForwardedState | ForwardedPoolingState


def _end(state: Forwarded, request: Request, number: int, reason: FinishReason) -> Change:
    change = state.outbox.change(number)
    change.finish_reason = reason
    change.error = state.error
    if isinstance(state, RequestState):
        change.error_param = state.error_param
    change.num_cached_tokens = request.num_cached_tokens
    change.first_scheduled = request.first_scheduled
    change.num_preemptions = request.num_preemptions
    return change
