"""The pipelined step loop: schedules step N + 1 while step N runs on the device."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

from ..protocols import Executor
from ..scheduling.request import Update
from ..scheduling.scheduler import Scheduler
from ..types import StepPlan, StepResult

STEPS_IN_FLIGHT = 2


class StepLoop:
    """Keeps the device fed. Everything here runs on the event loop.

    `publish` gets each result's updates; `died` gets the error that ended the loop.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        publish: Callable[[list[Update]], None],
        stepped: Callable[[StepPlan, StepResult], None],
        died: Callable[[BaseException], None],
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.publish = publish
        self.stepped = stepped
        self.died = died
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin stepping."""
        self._task = asyncio.create_task(self._run(), name="jackfield-steps")

    @property
    def running(self) -> bool:
        """Whether steps are made."""
        return self._task is not None and not self._task.done()

    def wake(self) -> None:
        """There is something to schedule."""
        self._wake.set()

    async def stop(self) -> None:
        """End after the steps in flight."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        in_flight: collections.deque[tuple[StepPlan, asyncio.Future[StepResult]]]
        in_flight = collections.deque()
        try:
            while True:
                self._wake.clear()
                self._fill(in_flight)
                if not in_flight:
                    self.publish(self.scheduler.take_failures())
                    await self._wake.wait()
                    continue
                plan, future = in_flight.popleft()
                # Shielded: cancelling this task must not lose the step's second half.
                result = await asyncio.shield(future)
                self.publish(self.scheduler.update(plan, result))
                self.stepped(plan, result)
        except asyncio.CancelledError:
            await asyncio.gather(*(future for _, future in in_flight), return_exceptions=True)
            raise
        except BaseException as error:
            await asyncio.gather(*(future for _, future in in_flight), return_exceptions=True)
            self.died(error)

    def _fill(
        self, in_flight: collections.deque[tuple[StepPlan, asyncio.Future[StepResult]]]
    ) -> None:
        while len(in_flight) < STEPS_IN_FLIGHT:
            plan = self.scheduler.schedule()
            if plan is None:
                return
            in_flight.append((plan, self.executor.submit(plan)))
