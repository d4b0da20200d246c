"""The outputs of one request, as an asynchronous iterator.

A stream holds no queue: it reads the state when its caller is ready, so that a slow caller gets
fewer, larger outputs and costs no memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from ..outputs import RequestOutput
from .request_state import RequestState


class Progress(NamedTuple):
    """How far a request has come."""

    first_token: float | None
    """When its first token came, by `time.monotonic`."""
    num_tokens: int
    """Of all its completions."""


class OutputStream:
    """Result of `AsyncEngine.generate`: an async iterator that aborts when it is dropped.

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
        """Start the request now instead of at the first step. Raises what that step would."""
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
            while (output := self._state.take_output()) is None:
                self._state.changed.clear()
                await self._state.changed.wait()
        except BaseException:
            self._close()
            raise
        if output.finished:
            self._closed = True
        return output

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` from now on when `take_output` has something.

        It is called on the event loop, once per step with output, after the next step has been
        submitted: no task is woken per token. Call this after the first output. The listener must
        not raise.
        """
        assert self._state is not None, "await the first output before listening"
        self._state.listener = listener

    def take_output(self) -> RequestOutput | None:
        """Return the output that is there now, or None, without waiting."""
        if self._closed or self._state is None:
            return None
        output = self._state.take_output()
        if output is not None:
            self._closed = output.finished
        return output

    @property
    def progress(self) -> Progress | None:
        """None before the request has begun; it stays after the end."""
        if self._state is None:
            return None
        num_tokens = sum(len(completion.token_ids) for completion in self._state.completions)
        return Progress(self._state.timings.first_token, num_tokens)

    async def aclose(self) -> None:
        """Abort the request if it is still running."""
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
