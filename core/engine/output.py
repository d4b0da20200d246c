"""From step results to what callers see: one `RequestState` a request, one `OutputStream` a caller.

A stream holds no queue: it reads the state when its caller is ready, so that a slow caller gets
fewer, larger outputs and costs no memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..scheduling.request import Request, Update
from ..text.output_text import OutputText
from ..text.tokenizer import Tokenizer
from ..types import (
    CompletionOutput,
    FinishReason,
    Logprob,
    OutputKind,
    PositionLogprobs,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    TokenLogprobs,
)


class Completion:
    """One of the `n` completions, as it grows."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.request = request
        self.tokenizer = tokenizer
        params = request.params
        self.text = (
            OutputText(tokenizer, request.prompt_token_ids, params)
            if tokenizer is not None and params.detokenize
            else None
        )
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._taken_tokens = 0
        self._told_finish = False

    def apply(self, update: Update) -> str | None:
        """Take new tokens; → the stop string that ends this completion, if one does."""
        request = update.request
        if self.logprobs is None and not update.finished:
            return self.apply_tokens(update.new_token_ids)
        ended_by_token = update.finished and request.finish_reason == "stop"
        for number, token in enumerate(update.new_token_ids):
            self.token_ids.append(token)
            if self.logprobs is not None and update.logprobs is not None:
                position = update.logprobs[number]
                self.logprobs.append(_position(position, self.tokenizer))
                self.cumulative_logprob += position.logprob
            if self.text is None:
                continue
            is_stop_token = ended_by_token and number == len(update.new_token_ids) - 1
            if is_stop_token and not request.params.include_stop_str_in_output:
                continue
            match = self.text.push([token], len(self.token_ids))
            if match is not None and not is_stop_token:
                return match.stop
        return None

    def apply_tokens(self, new_token_ids: Sequence[int]) -> str | None:
        """`apply` for the most: tokens that end nothing, and nothing beside them."""
        token_ids, text = self.token_ids, self.text
        if text is None:
            token_ids += new_token_ids
            return None
        for token in new_token_ids:
            token_ids.append(token)
            match = text.push((token,), len(token_ids))
            if match is not None:
                return match.stop
        return None

    def finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """No more tokens."""
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = reason, stop_reason
            if self.text is not None:
                self.text.finish(reason)

    @property
    def has_news(self) -> bool:
        """Something the caller has not been given."""
        return self._taken_tokens < len(self.token_ids) or (
            self.finish_reason is not None and not self._told_finish
        )

    def take(self, delta: bool) -> CompletionOutput:
        """What the caller gets now."""
        first = self._taken_tokens if delta else 0
        text = ""
        if self.text is not None:
            text = self.text.take_delta() if delta else self.text.text
        self._taken_tokens = len(self.token_ids)
        self._told_finish = self.finish_reason is not None
        return self._output(text, first)

    def peek(self) -> CompletionOutput:
        """All of it so far, without taking it from the caller."""
        return self._output(self.text.text if self.text is not None else "", 0)

    def _output(self, text: str, first: int) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[first:],
            logprobs=None if self.logprobs is None else self.logprobs[first:],
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class RequestState:
    """A caller's request: its completions, and what was published of them."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        requests: list[Request],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.requests = requests
        self.tokenizer = tokenizer
        self.completions = [Completion(i, r, tokenizer) for i, r in enumerate(requests)]
        self.prompt_logprobs: list[PositionLogprobs | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.timings = RequestTimings(arrival=requests[0].arrival)
        self.error: str | None = None
        self.changed = asyncio.Event()
        self.listener: Callable[[], None] | None = None
        """Called when there is news, instead of `changed` being set."""

    @property
    def finished(self) -> bool:
        for completion in self.completions:
            if completion.finish_reason is None:
                return False
        return True

    def add_prompt_logprobs(self, positions: list[TokenLogprobs]) -> None:
        """Positions arrive in order; a preempted prompt brings some again, which are skipped."""
        if self.prompt_logprobs is None:
            return
        room = len(self.requests[0].prompt_token_ids) - len(self.prompt_logprobs)
        self.prompt_logprobs.extend(_position(p, self.tokenizer) for p in positions[:room])

    def mark_tokens(self, now: float) -> float | None:
        """Tokens have arrived; → when the ones before them had, None for the first."""
        timings = self.timings
        before = timings.last_token
        if before is None:
            timings.first_token = now
            timings.first_scheduled = self.requests[0].first_scheduled
        timings.last_token = now
        return before

    def mark_finished(self) -> None:
        self.timings.finished = time.monotonic()
        self.timings.num_preemptions = sum(r.num_preemptions for r in self.requests)

    @property
    def has_output(self) -> bool:
        """Whether the caller should be given an output now."""
        if self.params.output_kind is OutputKind.FINAL_ONLY:
            return self.finished
        for completion in self.completions:
            if completion.has_news:
                return True
        return False

    def take(self) -> RequestOutput:
        """The output the caller gets now."""
        delta = self.params.output_kind is OutputKind.DELTA
        chosen = self.completions
        if delta and len(chosen) > 1:
            chosen = [c for c in chosen if c.has_news]
        return self._output([c.take(delta) for c in chosen])

    def peek(self) -> RequestOutput:
        """All of it so far, without taking it from the caller."""
        return self._output([c.peek() for c in self.completions])

    def _output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.requests[0].prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self.requests[0].num_cached_tokens,
            timings=self.timings,
            error=self.error,
            kv_transfer_params=self._kv_transfer_params(),
        )

    def _kv_transfer_params(self) -> dict[str, Any] | None:
        for request in self.requests:
            if request.kv_transfer_params:
                return request.kv_transfer_params
        return None


class OutputStream:
    """What `AsyncEngine.generate` returns: an async iterator that aborts when it is dropped.

    Leaving a loop over it, cancelling the task that waits for it, or `aclose()` abort the request
    at once.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[RequestState]],
        abort: Callable[[RequestState], None],
    ) -> None:
        self._start = start
        self._abort = abort
        self._state: RequestState | None = None
        self._closed = False

    def __aiter__(self) -> OutputStream:
        return self

    async def admit(self) -> None:
        """Start the request now, which else the first step does. Raises what that would."""
        try:
            if self._state is None and not self._closed:
                self._state = await self._start()
        except BaseException:
            self._close()
            raise

    async def __anext__(self) -> RequestOutput:
        if self._closed:
            raise StopAsyncIteration
        try:
            if self._state is None:
                self._state = await self._start()
            while not self._state.has_output:
                self._state.changed.clear()
                await self._state.changed.wait()
        except BaseException:
            self._close()
            raise
        output = self._state.take()
        if output.finished:
            self._closed = True
        return output

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` from now on when there is something to `take`.

        It is called on the event loop, once for what a step has brought, after the next step is on
        its way: no task is woken for a token. Only after the first output; it must not raise.
        """
        assert self._state is not None, "the first output comes first"
        self._state.listener = listener

    def take(self) -> RequestOutput | None:
        """What there is now, without waiting; None when there is nothing."""
        if self._closed or self._state is None or not self._state.has_output:
            return None
        output = self._state.take()
        self._closed = output.finished
        return output

    async def aclose(self) -> None:
        """Abort, if it is still running."""
        self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._state is not None:
                self._state.listener = None
            if self._state is not None and not self._state.finished:
                self._abort(self._state)

    def __del__(self) -> None:
        self._close()


def _position(position: TokenLogprobs, tokenizer: Tokenizer | None) -> PositionLogprobs:
    """The position's own token first, then the most likely ones."""

    def text(token: int) -> str | None:
        return tokenizer.token_text(token) if tokenizer is not None else None

    table = {position.token_id: Logprob(position.logprob, position.rank, text(position.token_id))}
    for rank, (token, value) in enumerate(
        zip(position.top_ids, position.top_logprobs, strict=True), start=1
    ):
        if token not in table:
            table[token] = Logprob(value, rank, text(token))
    return table
