"""The pipelined step loop: schedules step N + 1 while step N runs on the device."""

from __future__ import annotations

import asyncio
import collections
import logging
import math
from collections.abc import Callable
from typing import Protocol, TypeAlias

from ..errors import PluginError
from ..protocols.executors import Executor
from ..request import Update
from ..scheduling.pacing.plan_timing import PlanTiming
from ..scheduling.scheduler import Scheduler
from ..step import BalanceExperts, PrepareAhead, Recover, StepPlan, StepResult

logger = logging.getLogger("jackfield.engine")
IDLE_SECONDS = 0.05
"""Idle seconds before the worker prepares later steps."""
QUIET_SECONDS = 0.5
"""Seconds without a new request before it does. Recording a step of 8B on an H200 takes 80 ms,
which delays a request."""
MAX_FAILED_STEPS = 3
InFlight: TypeAlias = collections.deque[tuple[StepPlan, asyncio.Future[StepResult]]]


class StepTimeline(Protocol):
    """Notes the times of steps."""

    def begin(self) -> None: ...
    def planned(self, plan: StepPlan) -> None: ...
    def ended(self, plan: StepPlan, result: StepResult) -> None: ...
    def published(self, plan: StepPlan) -> None: ...


class BalanceTimes:
    """When experts are counted and moved, in steps with rows."""

    def __init__(self, interval: int, window: int) -> None:
        """`interval`: steps between moves; `window`: last of them to count."""
        self.num_steps = 0
        self._interval, self._window = interval, window
        self._counts = False

    @property
    def due(self) -> BalanceExperts | None:
        """The job due now."""
        if self._counts:
            return BalanceExperts() if self.num_steps >= self._interval else None
        begins = self.num_steps >= self._interval - self._window
        return BalanceExperts(moves=False) if begins else None

    def done(self, job: BalanceExperts) -> None:
        self._counts = not job.moves
        if job.moves:
            self.num_steps = 0


class StepLoop:
    """Keeps steps in flight on the executor. For the event loop only.

    `publish` gets each result's updates; `died` the error that ended the loop. A failed step ends
    its own requests, and the loop continues if the executor can recover.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        steps_in_flight: int,
        num_stages: int = 1,
        publish: Callable[[list[Update]], None],
        stepped: Callable[[StepPlan, StepResult], None],
        died: Callable[[BaseException], None],
        balancing: BalanceTimes | None = None,
    ) -> None:
        """`balancing`: places experts by load; None: never."""
        self.scheduler = scheduler
        self.executor = executor
        self.steps_in_flight = steps_in_flight
        self._delays = num_stages == 1
        """Whether plans are delayed: the first of several stages needs them early."""
        self.publish = publish
        self.stepped = stepped
        self.died = died
        self._num_failed = 0
        """Failed steps since the last success with rows."""
        self._prepares = True
        """Whether the executor supports `PrepareAhead`."""
        self._timing = PlanTiming()
        self.timeline: StepTimeline | None = None
        """Notes what the loop does, while a profile runs."""
        self._balancing = balancing
        self._failure: Exception | None = None
        """Why the executor cannot continue."""
        self._quiet_from = -math.inf
        """When QUIET_SECONDS without a request will have passed."""
        self._wake = asyncio.Event()
        self._holders: dict[object, asyncio.Event] = {}
        """Callers of `hold` → set once no step is in flight."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="jackfield-steps")

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    def wake(self) -> None:
        self._wake.set()

    def arrived(self) -> None:
        self._quiet_from = asyncio.get_running_loop().time() + QUIET_SECONDS
        self._timing.arrived()
        self._wake.set()

    def fail(self, error: Exception) -> None:
        self._failure = error
        self._wake.set()

    def hold(self, holder: object) -> asyncio.Event:
        """Launch no further step, until `let_go`. Return what is set once none is in flight."""
        idle = self._holders.setdefault(holder, asyncio.Event())
        if not self.running:
            idle.set()
        self._wake.set()
        return idle

    def let_go(self, holder: object) -> None:
        """Launch steps again, unless others hold them. Harmless without `hold`."""
        self._holders.pop(holder, None)
        self._wake.set()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        in_flight: InFlight = collections.deque()
        try:
            while True:
                if self._failure is not None:
                    raise self._failure
                self._wake.clear()
                balance = None if self._balancing is None else self._balancing.due
                if self._holders:
                    self._fill(in_flight)
                    if not in_flight:
                        await self._rest()
                        continue
                elif balance is None:
                    self._fill(in_flight)
                elif not in_flight:
                    await self._balance(balance)
                    continue
                if not in_flight:
                    self.publish(self.scheduler.take_failures())
                    await self._idle()
                    continue
                if delay := self._delay(in_flight):
                    await asyncio.wait([in_flight[0][1]], timeout=delay)
                    if not in_flight[0][1].done():
                        continue
                plan, future = in_flight.popleft()
                try:
                    # Shielded: cancelling this task must not lose the step's second half.
                    result = await asyncio.shield(future)
                except Exception as error:
                    await self._recover(plan, error, in_flight)
                    continue
                self._timing.ended(plan, result)
                if self.timeline is not None:
                    self.timeline.ended(plan, result)
                if plan.slots:
                    self._num_failed = 0
                    if self._balancing is not None:
                        self._balancing.num_steps += 1
                self.publish(self.scheduler.update(plan, result))
                self.stepped(plan, result)
                if self.timeline is not None:
                    self.timeline.published(plan)
        except asyncio.CancelledError:
            await asyncio.gather(*(future for _, future in in_flight), return_exceptions=True)
            raise
        except BaseException as error:
            await asyncio.gather(*(future for _, future in in_flight), return_exceptions=True)
            self.died(error)
            for idle in self._holders.values():  # Who waits for rest learns that from the engine.
                idle.set()

    async def _rest(self) -> None:
        """Wait for the end of a hold, or for something to publish."""
        self.publish(self.scheduler.take_failures())
        for idle in self._holders.values():
            idle.set()
        await self._wake.wait()

    async def _idle(self) -> None:
        """Wait for work, while the worker prepares later steps."""
        more = True
        while more and self._prepares:
            quiet = self._quiet_from - asyncio.get_running_loop().time()
            try:
                # Python 3.11's wait_for loses a cancellation that comes together with the event.
                async with asyncio.timeout(max(IDLE_SECONDS, quiet)):
                    await self._wake.wait()
            except TimeoutError:
                more = await self._prepare_ahead()
            else:
                return
        await self._wake.wait()

    async def _prepare_ahead(self) -> bool:
        """Return whether more can be prepared."""
        try:
            return bool(await asyncio.shield(self.executor.ask(PrepareAhead())))
        except NotImplementedError:
            self._prepares = False
        except Exception:
            if self._failure is None:
                logger.exception("preparing for later steps failed; it is given up")
            self._prepares = False
        return False

    async def _balance(self, job: BalanceExperts) -> None:
        """Count or move experts while requests wait. Raises errors, as some ranks may have
        moved.
        """
        assert self._balancing is not None
        await asyncio.shield(self.executor.ask(job))
        self._balancing.done(job)

    async def _recover(self, plan: StepPlan, error: Exception, in_flight: InFlight) -> None:
        """End a failed step's requests. Raises its error if the loop cannot continue."""
        if self._failure is not None:
            raise self._failure
        self._num_failed += 1
        if self._num_failed >= MAX_FAILED_STEPS:
            raise error
        # Steps planned after it are not run (`Recover`).
        behind = await asyncio.gather(*(future for _, future in in_flight), return_exceptions=True)
        in_flight.clear()
        self._timing.failed()
        logger.error("a step failed; its requests end, others go on", exc_info=error)
        try:
            await self.executor.ask(Recover())
        except NotImplementedError:
            raise error from None
        except Exception as cause:
            logger.error("the executor cannot go on after it", exc_info=cause)
            if self._failure is not None:
                # What has failed says more than what a step saw of it.
                raise self._failure from error
            raise error from cause
        # A PluginError's message has the type and the plugin already.
        kind = "" if isinstance(error, PluginError) else f"{type(error).__name__}: "
        dropped = [result for result in behind if not isinstance(result, BaseException)]
        self.publish(self.scheduler.fail_step(plan, f"the step failed: {kind}{error}", dropped))

    def _delay(self, in_flight: InFlight) -> float:
        """Return the seconds before the last place in flight is filled."""
        last_place = self._delays and len(in_flight) == self.steps_in_flight - 1
        return self._timing.delay() if last_place and in_flight else 0.0

    def _fill(self, in_flight: InFlight) -> None:
        while len(in_flight) < self.steps_in_flight and not self._delay(in_flight):
            start = self._timing.now()
            if self.timeline is not None:
                self.timeline.begin()
            if self._holders:
                plan = self.scheduler.owed_plan()
            else:
                plan = self.scheduler.schedule(self._timing.pace())
            if plan is None:
                return
            try:
                future = self.executor.submit(plan, self.scheduler.in_process(plan))
            except Exception as error:
                self.scheduler.not_taken(plan)
                future = asyncio.get_running_loop().create_future()
                future.set_exception(error)
            self._timing.submitted(plan, start)
            self.scheduler.submitted()
            if self.timeline is not None:
                self.timeline.planned(plan)
            in_flight.append((plan, future))
