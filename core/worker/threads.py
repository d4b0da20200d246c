"""The threads between the event loop and the device: one launches, one waits.

The launch thread owns the device: everything that touches it runs there, in order. A step is
launched without waiting for it; the completion thread waits on its event, which releases the
interpreter lock, and hands the result to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ..step import StepPlan, StepResult

logger = logging.getLogger("jackfield.worker")
T = TypeVar("T")

IDLE_SECONDS = 0.05
"""Seconds without a job after which the launch thread does idle work."""
_WAKE = object()


class PendingStep(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Block until the device is done; runs on the completion thread."""


class WorkerThread:
    """Runs device work in order, off the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str = "jackfield-worker") -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._spare: Callable[[], bool] | None = None
        # Each has one writer: the launch thread, the completion thread.
        self._num_launched = 0
        self._num_completed = 0
        self._launched: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._launch, name=name, daemon=True),
            threading.Thread(target=self._complete, name=f"{name}-wait", daemon=True),
        ]
        self._closed = False
        for thread in self._threads:
            thread.start()

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function on the launch thread, after the queued ones."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self._closed:
            future.set_exception(RuntimeError("the worker thread is closed"))
        else:
            self._jobs.put((function, future, False))
        return future

    def step(self, launch: Callable[[], PendingStep]) -> asyncio.Future[StepResult]:
        """Launch a step; the future is done when the device has finished it."""
        future: asyncio.Future[StepResult] = self._loop.create_future()
        if self._closed:
            future.set_exception(RuntimeError("the worker thread is closed"))
        else:
            self._jobs.put((launch, future, True))
        return future

    def when_idle(self, work: Callable[[], bool]) -> None:
        """Call `work` on the launch thread whenever it has been idle, until it returns False.

        Each call should be short: steps that arrive meanwhile wait for it.
        """
        self._spare = work
        self._jobs.put(_WAKE)

    async def close(self) -> None:
        """Finish what is queued and end both threads. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _next_job(self) -> Any:
        while self._spare is not None:
            try:
                return self._jobs.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                self._use_spare_time(self._spare)
        return self._jobs.get()

    def _use_spare_time(self, work: Callable[[], bool]) -> None:
        if self._num_launched != self._num_completed:
            return
        try:
            more = work()
        except Exception:
            logger.exception("work in spare time failed; it is given up")
            more = False
        if not more:
            self._spare = None

    def _launch(self) -> None:
        while (job := self._next_job()) is not None:
            if job is _WAKE:
                continue
            function, future, is_step = job
            try:
                result = function()
            except BaseException as error:
                self._hand_over(future, None, error)
                continue
            if is_step:
                self._num_launched += 1
                self._launched.put((result, future))
            else:
                self._hand_over(future, result, None)
            del job, function, future, result
        self._launched.put(None)

    def _complete(self) -> None:
        while (launched := self._launched.get()) is not None:
            pending, future = launched
            try:
                result = pending.wait()
            except BaseException as error:
                self._hand_over(future, None, error)
            else:
                self._hand_over(future, result, None)
            self._num_completed += 1

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
