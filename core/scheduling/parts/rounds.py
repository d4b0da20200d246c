"""Rounds: plans without rows, while other engines need this one's experts.

All engines run the same number of steps in a wave, step by step (rounds), each with rows or
without. A round in which none has a token ends the wave: `steps_in_flight` rounds after it, since
some may have planned as many by then. All see the same results, and so end with the same round;
what comes later begins another wave, of which the others are notified.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from ...parts.rounds import NAME, RoundResult
from ...step import PartPlan, StepPlan, StepResult
from ..plan_builder import PlanBuilder
from .part import PartMaker, PartServices, SchedulerPart


class Rounds(SchedulerPart):
    name = NAME

    def __init__(
        self, services: PartServices, steps_in_flight: int, announce: Callable[[int], None]
    ) -> None:
        self.wave = 0
        """Number of the last wave that has begun here."""
        self._steps_in_flight, self._announce = steps_in_flight, announce
        self._asked = 0
        """Number of the last wave that another engine has begun."""
        self._num_planned = self._num_done = 0
        """Rounds of the wave."""
        self._size: int | None = 0
        """Rounds that the wave has; None: not known yet."""
        self._in_flight: collections.deque[int] = collections.deque()
        """Wave of each."""

    @classmethod
    def maker(cls, steps_in_flight: int, announce: Callable[[int], None]) -> PartMaker:
        """Return what makes the part. announce: tells the other engines that a wave has begun
        here."""
        return lambda services: cls(services, steps_in_flight, announce)

    def ask(self, wave: int) -> None:
        """Note that another engine has begun a wave."""
        self._asked = max(self._asked, wave)

    def needs_plan(self) -> bool:
        return self._is_open or self._asked > self.wave

    must_step = needs_plan

    @property
    def _is_open(self) -> bool:
        """Whether the wave has rounds that are not planned."""
        return self._size is None or self._num_planned < self._size

    def plan_part(self, step: int, builder: PlanBuilder) -> PartPlan | None:
        """Count the plan, which may begin a wave."""
        if not self._is_open:
            self.wave += 1
            self._num_planned = self._num_done = 0
            self._size = None
            if self._asked < self.wave:
                self._announce(self.wave)
        self._num_planned += 1
        self._in_flight.append(self.wave)
        return None

    def begin_result(self, plan: StepPlan, result: StepResult) -> None:
        """Find the wave's end."""
        if self._in_flight.popleft() != self.wave:
            return
        self._num_done += 1
        done = result.parts[NAME]
        assert isinstance(done, RoundResult)
        if done.num_tokens == 0 and self._size is None:
            self._size = self._num_done - 1 + self._steps_in_flight
