"""Rounds: engines that plan, hear of each other and finish in any order run the same steps."""

from __future__ import annotations

import collections
import random
from typing import Any

import pytest

from jackfield.core.parts.rounds import NAME, RoundResult
from jackfield.core.scheduling.parts.rounds import Rounds
from jackfield.core.step import StepPlan, StepResult


class SimulatedEngine:
    def __init__(self, steps_in_flight: int, others: list[SimulatedEngine]) -> None:
        self.others = others
        self.steps_in_flight = steps_in_flight
        self.heard: list[int] = []
        """Waves that others have begun, before it knows."""
        self.rounds = Rounds.maker(steps_in_flight, self.announce)(None)  # type: ignore[arg-type]
        self.work = 0
        """Steps with rows that are left."""
        self.planned: list[int] = []
        """Tokens of each round."""
        self.in_flight: collections.deque[int] = collections.deque()
        """Rounds without a result."""

    def announce(self, wave: int) -> None:
        for other in self.others:
            if other is not self:
                other.heard.append(wave)

    def plan(self, held: bool) -> None:
        if len(self.in_flight) == self.steps_in_flight:
            return
        works = self.work > 0 and not held
        if not works and not self.rounds.must_step():
            return
        self.work -= works
        self.rounds.plan_part(0, None)  # type: ignore[arg-type]
        self.in_flight.append(len(self.planned))
        self.planned.append(int(works))

    def finish(self, engines: list[Any]) -> None:
        """Take a result, if all engines have begun the round."""
        if not self.in_flight:
            return
        number = self.in_flight[0]
        if any(len(engine.planned) <= number for engine in engines):
            return
        self.in_flight.popleft()
        most = max(engine.planned[number] for engine in engines)
        result = StepResult(0, [], [], parts={NAME: RoundResult(most)})
        self.rounds.begin_result(StepPlan(0, (), (), ()), result)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_engines_run_the_same_rounds_in_any_order(steps_in_flight: int) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        engines: list[SimulatedEngine] = []
        engines += [SimulatedEngine(steps_in_flight, engines) for _ in range(3)]
        for move in range(1200):
            engine = draw.choice(engines)
            if move < 600 and draw.random() < 0.03:
                engine.work += draw.randint(1, 6)
            action = draw.choice(["plan", "hear", "finish"])
            if action == "hear" and engine.heard:
                engine.rounds.ask(engine.heard.pop(draw.randrange(len(engine.heard))))
            elif action == "finish":
                engine.finish(engines)
            elif action == "plan":
                # While it is held, it takes part in the others' rounds alone.
                engine.plan(held=300 < move < 450)
        for engine in engines * 200:  # Whatever is left.
            engine.plan(held=False)
            while engine.heard:
                engine.rounds.ask(engine.heard.pop())
            engine.finish(engines)
        assert [engine.work for engine in engines] == [0, 0, 0], seed
        assert not any(engine.in_flight for engine in engines), seed
        assert len({len(engine.planned) for engine in engines}) == 1, seed
        assert len({engine.rounds.wave for engine in engines}) == 1
        assert not any(engine.rounds.needs_plan() for engine in engines), "they are idle"
