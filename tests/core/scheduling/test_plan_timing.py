"""Plans are made as late as the device allows, and at once where that is not known."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from jackfield.core.engine import step_loop
from jackfield.core.engine.step_loop import StepLoop
from jackfield.core.scheduling.pacing.plan_timing import (
    HOST_RISES,
    HOST_SPIKE,
    MARGIN_SECONDS,
    MARGIN_SHARE,
    PlanTiming,
    StepPace,
)
from jackfield.core.step import StepPlan, StepResult


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def plan_of(tokens: int, step: int = 0) -> StepPlan:
    """Return a plan of one row."""
    return StepPlan(step=step, slots=[0], num_tokens=[tokens], samples=[True])


def run_step(timing: PlanTiming, clock: Clock, plan: StepPlan, host: float, device: float) -> None:
    """Plan, launch and finish a step with nothing else in flight."""
    timing.submitted(plan, timing.now())
    clock.seconds += host + device
    timing.ended(plan, StepResult(0, [1], [5], device_seconds=device))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def known(clock: Clock, *, device: float = 0.020, host: float = 0.002) -> PlanTiming:
    """Return a timing that knows steps of 512 tokens, after an arrival."""
    timing = PlanTiming(clock)
    timing.arrived()
    run_step(timing, clock, plan_of(512), host, device)
    return timing


def test_a_plan_waits_until_the_device_nearly_needs_it(clock: Clock) -> None:
    timing = known(clock)
    timing.submitted(plan_of(512), timing.now())
    lead = 0.002 + MARGIN_SECONDS + MARGIN_SHARE * 0.020
    assert timing.delay() == pytest.approx(0.002 + 0.020 - lead)
    clock.seconds += 0.022 - lead - 0.0015
    assert timing.delay() == pytest.approx(0.0015)
    clock.seconds += 0.001
    assert timing.delay() == 0, "timers are no finer than what is left"


def test_the_step_in_flight_begins_when_the_one_before_it_ends(clock: Clock) -> None:
    timing = known(clock)
    first, second = plan_of(512), plan_of(512)
    timing.submitted(first, timing.now())
    timing.submitted(second, timing.now())
    clock.seconds += 0.022
    # Launched together: the second has been on the device for none of these seconds.
    timing.ended(first, StepResult(0, [1], [5], device_seconds=0.020))
    lead = 0.002 + MARGIN_SECONDS + MARGIN_SHARE * 0.020
    assert timing.delay() == pytest.approx(0.020 - lead)
    clock.seconds += 0.020
    timing.ended(second, StepResult(1, [1], [5], device_seconds=0.040))
    # Its duration counts from the end of the first: it is no slower than that.
    timing.submitted(plan_of(512), timing.now())
    assert timing.delay() == pytest.approx(0.022 - lead)


@pytest.mark.parametrize("case", ["nothing in flight", "unknown size", "no arrival", "failed"])
def test_plans_are_made_at_once_where_waiting_gains_nothing(clock: Clock, case: str) -> None:
    timing = known(clock)
    if case != "nothing in flight":
        timing.submitted(plan_of(64 if case == "unknown size" else 512), timing.now())
    if case == "no arrival":
        clock.seconds += 2.0
        timing.submitted(plan_of(512), timing.now())
    if case == "failed":
        timing.failed()
    assert timing.delay() == 0


def test_steps_that_were_fast_once_are_expected_to_be_fast(clock: Clock) -> None:
    timing = known(clock, device=0.040)
    run_step(timing, clock, plan_of(512), 0.002, 0.010)
    timing.submitted(plan_of(512), timing.now())
    fast = timing.delay()
    timing.failed()
    run_step(timing, clock, plan_of(512), 0.002, 0.040)
    timing.submitted(plan_of(512), timing.now())
    assert 0 < fast < 0.025
    assert timing.delay() < fast + 0.001


QUICK = 0.020 - MARGIN_SECONDS - MARGIN_SHARE * 0.020
"""Delay with the whole of a step of 20 ms left, on a host that takes no time."""


def left_of_step(timing: PlanTiming, clock: Clock, host: float) -> float:
    """Return the delay when a step has just begun, behind one that took the host so long."""
    first, second = plan_of(512), plan_of(512)
    timing.submitted(first, timing.now())
    timing.submitted(second, timing.now())
    clock.seconds += host + 0.020
    timing.ended(first, StepResult(0, [1], [5], device_seconds=0.020))
    timing.arrived()
    delay = timing.delay()
    timing.failed()
    return delay


def test_a_slow_host_is_given_its_time(clock: Clock) -> None:
    timing = known(clock, host=0.002)
    timing.submitted(plan_of(512), timing.now())
    # The expected end moves too: what is left is the device's time but for the margins.
    assert timing.delay() == pytest.approx(QUICK)
    timing.failed()
    for _ in range(8):
        run_step(timing, clock, plan_of(512), 0.012, 0.020)
    assert left_of_step(timing, clock, 0.012) == pytest.approx(QUICK - 0.012, abs=1e-4)


def test_one_slow_plan_changes_little(clock: Clock) -> None:
    timing = known(clock, host=0.002)
    assert left_of_step(timing, clock, 0.002) == pytest.approx(QUICK - 0.002)
    at_most = 0.002 * (1 + HOST_RISES * (HOST_SPIKE - 1))
    assert left_of_step(timing, clock, 0.500) == pytest.approx(QUICK - at_most)
    for _ in range(100):
        run_step(timing, clock, plan_of(512), 0.002, 0.020)
    assert left_of_step(timing, clock, 0.002) == pytest.approx(QUICK - 0.002, abs=0.001)


def test_the_tokens_of_a_short_step_follow_the_device(clock: Clock) -> None:
    """A fifth of a millisecond and then 24 microseconds a token: 512 and 1,024 tokens."""
    timing = PlanTiming(clock)

    def short_step() -> int:
        pace = timing.pace()
        assert pace is not None
        return pace.short_step

    run_step(timing, clock, plan_of(64), 0.001, 0.004)
    assert timing.pace() is None, "steps of few tokens tell nothing"
    run_step(timing, clock, plan_of(512), 0.0, 0.2e-3 * 512)
    assert short_step() == 512
    for _ in range(20):
        run_step(timing, clock, plan_of(1024), 0.0, 24e-6 * 1024)
    assert short_step() == 1024
    run_step(timing, clock, plan_of(1024), 0.0, 30e-6 * 1024)
    assert short_step() == 1024, "one slow step changes little"


def test_a_step_begins_after_those_in_flight_or_once_it_is_launched(clock: Clock) -> None:
    timing = known(clock)
    pace = timing.pace()
    assert pace is not None and pace.seconds_per_token == pytest.approx(0.020 / 512)
    assert pace.start == pytest.approx(clock.seconds + 0.002)
    begun = clock.seconds
    timing.submitted(plan_of(512), begun)
    clock.seconds += 0.005
    pace = timing.pace()
    assert pace is not None and pace.start == pytest.approx(begun + 0.002 + 0.020)
    clock.seconds += 1.0
    pace = timing.pace()
    assert pace is not None and pace.start == pytest.approx(clock.seconds + 0.002), "it is late"


def test_steps_with_decode_rows_beside_prompts_are_timed_apart(clock: Clock) -> None:
    timing = known(clock, device=0.012)
    mixed = StepPlan(step=1, slots=[0, 1], num_tokens=[1, 512], samples=[True, True])
    run_step(timing, clock, mixed, 0.002, 0.015)
    ends = []
    for plan in (plan_of(512), mixed):
        timing.submitted(plan, clock.seconds)
        pace = timing.pace()
        assert pace is not None
        ends.append(pace.start - clock.seconds)
        timing.failed()
    assert ends == pytest.approx([0.002 + 0.012, 0.002 + 0.015])


def test_tokens_beside_decode_rows_follow_what_those_rows_and_prompts_take(clock: Clock) -> None:
    timing = PlanTiming(clock)
    rows = StepPlan(step=1, slots=range(10), num_tokens=[1] * 10, samples=[True] * 10)
    mixed = StepPlan(step=2, slots=range(11), num_tokens=[1] * 10 + [1000], samples=[True] * 11)

    def tokens_in(seconds: float) -> int:
        pace = timing.pace()
        assert pace is not None
        return pace.tokens_in(seconds)

    run_step(timing, clock, mixed, 0.0, 0.040)
    assert tokens_in(0.045) == 1024, "1,125 at 40 microseconds, in units"
    for _ in range(60):
        run_step(timing, clock, rows, 0.0, 0.015)
        run_step(timing, clock, mixed, 0.0, 0.040)
    assert tokens_in(0.045) == 1152, "1,200: 15 ms for decode rows, then 25 microseconds each"
    assert tokens_in(0.020) == 512, "the least step"
    for _ in range(60):
        run_step(timing, clock, rows, 0.0, 0.015)
        run_step(timing, clock, mixed, 0.0, 0.065)
    assert tokens_in(0.045) == 512, "a slower device is followed, too"


@pytest.mark.parametrize("spread", [0.02, 0.06])
def test_few_steps_beside_decode_rows_are_longer_than_planned(clock: Clock, spread: float) -> None:
    """Though their durations vary; half of them would be, by the mean."""
    draw, timing, late = random.Random(3), PlanTiming(clock), 0
    rows = StepPlan(step=1, slots=range(10), num_tokens=[1] * 10, samples=[True] * 10)
    for number in range(1000):
        pace = timing.pace()
        tokens = 1024 if pace is None else pace.tokens_in(0.045)
        mixed = StepPlan(
            step=2, slots=range(11), num_tokens=[1] * 10 + [tokens], samples=[True] * 11
        )
        run_step(timing, clock, rows, 0.0, 0.015)
        seconds = (0.015 + 0.000010 * tokens) * draw.gauss(1.0, spread)
        run_step(timing, clock, mixed, 0.0, seconds)
        late += number >= 200 and seconds > 0.045
    assert late < 0.05 * 800
    assert tokens > 2400, "3,000 fit without a spread"


class StubScheduler:
    """Always has a step of 512 tokens to plan."""

    def __init__(self) -> None:
        self.num_planned = 0

    def schedule(self, pace: StepPace | None = None) -> StepPlan:
        self.num_planned += 1
        return plan_of(512, self.num_planned)

    def in_process(self, plan: StepPlan) -> None:
        return None

    def submitted(self) -> None:
        pass

    def update(self, plan: StepPlan, result: StepResult) -> list[Any]:
        return []

    def take_failures(self) -> list[Any]:
        return []


class HandExecutor:
    """Ends a step when it is told to."""

    def __init__(self) -> None:
        self.futures: list[asyncio.Future[StepResult]] = []
        self.finished = False
        """Steps end at once."""

    def submit(self, plan: StepPlan, in_process: object) -> asyncio.Future[StepResult]:
        self.futures.append(asyncio.get_running_loop().create_future())
        if self.finished:
            self.futures[-1].set_result(StepResult(0, [1], [5]))
        return self.futures[-1]


@pytest.mark.parametrize(("arrived", "planned_during"), [(True, 1), (False, 2)])
async def test_the_loop_plans_late_while_requests_arrive(
    monkeypatch: pytest.MonkeyPatch, arrived: bool, planned_during: int
) -> None:
    """By the timing's clock, which moves only here: the second step is planned when the first ends,
    or at once where nobody arrives."""
    clock = Clock()
    monkeypatch.setattr(step_loop, "PlanTiming", lambda: PlanTiming(clock))
    scheduler, executor = StubScheduler(), HandExecutor()
    steps = StepLoop(
        scheduler, executor, steps_in_flight=2, publish=lambda updates: None,
        stepped=lambda plan, result: None, died=lambda error: None,
    )  # fmt: skip
    steps.start()

    async def let_run() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def end(index: int) -> None:
        await let_run()
        clock.seconds += 0.1
        # Launched when it was planned, at the beginning of the step before it.
        result = StepResult(0, [1], [5], device_seconds=0.2 if index > 1 else 0.1 * (index + 1))
        executor.futures[index].set_result(result)
        await let_run()

    try:
        for index in range(2):  # Nothing is known at first, so two are in flight.
            await end(index)
        if arrived:
            steps.arrived()
        await end(2)
        await end(3)
        in_flight = sum(not future.done() for future in executor.futures)
    finally:
        executor.finished = True
        for future in executor.futures:
            if not future.done():
                future.set_result(StepResult(0, [1], [5]))
        await steps.stop()
    assert in_flight == planned_during
