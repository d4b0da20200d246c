"""Brings an engine to rest, and lets it go on: the only way to an idle device.

What changes the model or the caches of an engine that serves does so within `at_rest`. A pause is
a rest that its caller ends, or its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable

from ..errors import EngineOverloaded, EnginePaused
from ..live.engine_jobs import Pause, PauseMode
from ..scheduling.scheduler import Scheduler
from .output_processor import OutputProcessor
from .step_loop import StepLoop

logger = logging.getLogger("jackfield.engine")
MAX_HELD = 1024
"""New requests that wait for the end of a pause, at most."""
MAX_RETRY_SECONDS = 30
"""Longest time after which a refused request is told to come again."""


class Lease:
    """Calls a function once too much time has passed since the last renewal."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._seconds: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float | None) -> None:
        """Begin, or begin again. None: it does not end."""
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Let it last as long as at its beginning, from now on."""
        self._cancel()
        if self._seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)

    def stop(self) -> None:
        """Let it not end any more."""
        self._seconds = None
        self._cancel()

    @property
    def left(self) -> float | None:
        """Seconds until it ends; None: it does not."""
        if self._timer is None:
            return None
        return max(0.0, self._timer.when() - asyncio.get_running_loop().time())

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        self._ended()


class Quiesce:
    """Whether steps may be launched, and requests may come. For the event loop only."""

    def __init__(self, scheduler: Scheduler, steps: StepLoop, outputs: OutputProcessor) -> None:
        self._scheduler, self._steps, self._outputs = scheduler, steps, outputs
        self._pause: Pause | None = None
        """The pause that has begun and not ended."""
        self._changed = asyncio.Event()
        """Set when another pause has begun since, or the pause has ended."""
        self._at_rest = False
        """Whether the pause has brought the engine to rest."""
        self._most_waiting = 0
        self._one = asyncio.Lock()
        self.lease = Lease(self._lease_ended)

    @property
    def mode(self) -> PauseMode | None:
        """The mode of the pause; None: there is none."""
        return None if self._pause is None else self._pause.mode

    @property
    def is_paused(self) -> bool:
        """Whether a pause has brought the engine to rest."""
        return self._at_rest

    @property
    def keeps_caches(self) -> bool:
        """Whether a pause keeps requests with their caches."""
        pause = self._pause
        return pause is not None and pause.mode == "keep" and not pause.clear_cache

    def check_open(self, num_waiting: int) -> None:
        """Raise EnginePaused or EngineOverloaded unless a request may come now."""
        if self._pause is None:
            return
        if self._pause.mode != "keep":
            error = EnginePaused("the engine is paused, and takes no requests; try again later")
            left = self.lease.left
            if left is not None:
                error.retry_after = min(MAX_RETRY_SECONDS, max(1, math.ceil(left)))
            raise error
        if num_waiting >= self._most_waiting:
            raise EngineOverloaded(
                f"the engine is paused, and {MAX_HELD} requests have come since; try again later"
            )

    # ------------------------------------------------------------ pause and resume

    async def pause(self, pause: Pause) -> bool:
        """Bring the engine to rest, and leave it so. Return False if the pause was ended, or took
        another's place, before that."""
        # The gate closes first: no request comes between the end of others and the rest.
        self._changed.set()
        changed = self._changed = asyncio.Event()
        self._pause = pause
        self._most_waiting = self._scheduler.num_waiting + len(self._scheduler.requests.running)
        self._most_waiting += MAX_HELD
        self.lease.begin(pause.lease)
        requests = self._outputs.requests
        if pause.mode == "abort":
            for state in list(requests.states.values()):
                self._outputs.abort_request(state)
        if pause.mode == "wait":
            self._let_go()  # Of an earlier pause that kept requests.
            if not await _first(requests.idle, changed):
                return False
        if not await _first(self._steps.hold(self), changed):
            return False
        self._at_rest = True
        if pause.clear_cache:
            async with self._one:
                if not changed.is_set():
                    self._scheduler.restart_running()
                    self._scheduler.reset_prefix_cache()
        return not changed.is_set()

    def resume(self) -> bool:
        """End the pause; return whether there was one."""
        paused = self._pause is not None
        self._changed.set()
        self._pause = None
        self.lease.stop()
        self._let_go()
        return paused

    def _let_go(self) -> None:
        self._at_rest = False
        self._steps.let_go(self)

    def _lease_ended(self) -> None:
        logger.warning("the lease of a pause has ended: the engine goes on")
        self.resume()

    # ------------------------------------------------------------ rest

    @contextlib.asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """Context in which no step is in flight, and none is launched; one at a time."""
        async with self._one:
            reason = object()
            idle = self._steps.hold(reason)
            try:
                await idle.wait()
                yield
            finally:
                self._steps.let_go(reason)


async def _first(event: asyncio.Event, other: asyncio.Event) -> bool:
    """Wait for either event. Return whether the other is not set."""
    waits = [asyncio.ensure_future(each.wait()) for each in (event, other)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return not other.is_set()
