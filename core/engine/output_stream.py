"""A request's outputs, as an asynchronous iterator.

It has no queue: it reads the state when its caller is ready, so slow callers get fewer, larger
outputs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from ..outputs import RequestOutput
from .request_state import RequestState


class Progress(NamedTuple):
    """A request's progress."""

    first_token: float | None
    num_tokens: int


class OutputStream:
    """Result of `AsyncEngine.generate`.

    Leaving its loop, cancelling a waiting task, or `aclose()` aborts the request.
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
        """Start the request now. Raises what the first step would."""
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
        """Call `listener` whenever `take_output` has something, instead of waking tasks.

        Called on the event loop once per step, after the next step's submission; must not raise.
        Use after the first output.
        """
        assert self._state is not None, "await the first output before listening"
        self._state.listener = listener

    def take_output(self) -> RequestOutput | None:
        """Return available output without waiting, or None."""
        if self._closed or self._state is None:
            return None
        output = self._state.take_output()
        if output is not None:
            self._closed = output.finished
        return output

    @property
    def progress(self) -> Progress | None:
        """None before the request begins."""
        if self._state is None:
            return None
        num_tokens = sum(len(completion.token_ids) for completion in self._state.completions)
        return Progress(self._state.timings.first_token, num_tokens)

    async def aclose(self) -> None:
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
