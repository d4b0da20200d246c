"""The threads between event loop and device: one launches, one waits.

The launch thread owns the device. Steps are launched without waiting; the completion thread waits
on their events, without the interpreter lock, and passes results to the event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

from ..step import StepPlan, StepResult

SET_NAME, SET_TIMER_SLACK = 15, 29
"""Linux's prctl codes."""
TIMER_SLACK_NS = 1000
LAUNCH_THREAD, COMPLETION_THREAD = "launch", "completion"
"""Names in the system."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    def wait(self) -> T_co:
        """Block until the device is done, on the completion thread."""


PendingStep: TypeAlias = Pending[StepResult]


def settle_in(name: str, *, on_time: bool = True) -> None:
    """Name this thread (up to 15 bytes) for `top -H`. on_time: end its timed waits within a
    microsecond, not 50; a thread waiting for the interpreter lock then uses most of a core
    (`SWITCH_INTERVAL`).
    """
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(SET_NAME, name.encode()[:15], 0, 0, 0)
        if on_time:
            prctl(SET_TIMER_SLACK, TIMER_SLACK_NS, 0, 0, 0)


class WorkerThread:
    """Runs device work in order, off the event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str = "jackfield-worker",
        *,
        on_time: bool = True,
    ) -> None:
        """on_time: as of `settle_in`; not for CPU computations."""
        self._loop = loop
        self._on_time = on_time
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._launch, name=name, daemon=True),
            threading.Thread(target=self._complete, name=f"{name}-wait", daemon=True),
        ]
        self._closed = False
        for thread in self._threads:
            thread.start()

    @property
    def launch_thread(self) -> int:
        return self._threads[0].ident or 0

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function on the launch thread, after queued ones."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self._closed:
            future.set_exception(RuntimeError("the worker thread is closed"))
        else:
            self._jobs.put((function, future, False))
        return future

    def step(self, launch: Callable[[], Pending[T]]) -> asyncio.Future[T]:
        """Launch a step; the future is done when the device is."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self._closed:
            future.set_exception(RuntimeError("the worker thread is closed"))
        else:
            self._jobs.put((launch, future, True))
        return future

    async def close(self) -> None:
        """Finish queued work and end both threads. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _launch(self) -> None:
        settle_in(LAUNCH_THREAD, on_time=self._on_time)
        while (job := self._jobs.get()) is not None:
            function, future, is_step = job
            try:
                result = function()
            except BaseException as error:
                self._hand_over(future, None, error)
                continue
            if is_step:
                self._launched.put((result, future))
            else:
                self._hand_over(future, result, None)
            del job, function, future, result
        self._launched.put(None)

    def _complete(self) -> None:
        settle_in(COMPLETION_THREAD, on_time=self._on_time)
        while (launched := self._launched.get()) is not None:
            pending, future = launched
            try:
                result = pending.wait()
            except BaseException as error:
                self._hand_over(future, None, error)
            else:
                self._hand_over(future, result, None)

    def _hand_over(
        self, future: asyncio.Future[Any], result: Any, error: BaseException | None
    ) -> None:
        def settle() -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(settle)


__all__ = ["PendingStep", "StepPlan", "WorkerThread"]
