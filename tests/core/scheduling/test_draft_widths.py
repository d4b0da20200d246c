"""Adaptive widths of drafts, in virtual time: never slower than without, as good as what pays."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from scheduled import add, drafted, drafts_of, make_request

from jackfield.core.config.speculative_config import SpeculativeConfig
from jackfield.core.errors import ConfigError
from jackfield.core.scheduling.parts.draft_widths import DraftWidths
from jackfield.core.scheduling.parts.speculation import Speculation
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import StepPlan, StepResult
from jackfield.plugins.policies.builtin import FirstComeFirstServed

MOST = 8
WIDTHS = (1, 2, 4, 8)


@dataclass
class Device:
    """Says how long a step takes: as long as its weights take to be read, or its tokens to be
    computed, and its launches, if it was not recorded."""

    weights: float = 0.004
    token: float = 0.00002
    launches: float = 0.0006
    search: float = 0.0
    """Of new drafts, after each step in which it does not rest."""
    rests: bool = False

    @staticmethod
    def recorded(plan: StepPlan) -> bool:
        return len(set(plan.num_tokens)) == 1 and plan.num_tokens[0] - 1 in (0, *WIDTHS)

    def seconds(self, plan: StepPlan) -> float:
        tokens = sum(plan.num_tokens)
        if (rests := drafts_of(plan).rests) is not None:
            assert rests != self.rests and not any(drafts_of(plan).num_drafts)
            self.rests = rests
        launches = 0.0 if self.recorded(plan) else self.launches
        search = 0.0 if self.rests else self.search
        return max(self.weights, self.token * tokens) + launches + search


@dataclass
class Traffic:
    """Requests that never end, and what is accepted of their drafts."""

    num_rows: int
    rates: list[float]
    """Probability of each draft, by request."""
    proposing: float = 1.0
    """Share of results after which a row has proposals."""
    widths: Any = None
    device: Device = field(default_factory=Device)
    now: float = 0.0
    numbers: tuple[int, ...] = (MOST,)
    """How many proposals there may be."""
    lengths: tuple[int, ...] = ()
    """Of outputs: a request that has ended is followed by another; empty: they never end."""

    def __post_init__(self) -> None:
        self.draw = random.Random(1)
        self.planned: list[int] = []
        """Drafts of each plan."""
        part = None
        if self.widths is not None:

            def part(services: Any) -> Speculation:
                return Speculation(services, MOST, self.widths, 1 << 18, clock=lambda: self.now)

        self.scheduler = Scheduler(
            max_num_seqs=self.num_rows, max_num_batched_tokens=8192, max_model_len=1 << 18,
            num_blocks=1 << 17, block_size=16, enable_prefix_caching=False,
            enable_chunked_prefill=True, policy=FirstComeFirstServed(),
            parts=[] if part is None else [part],
        )  # fmt: skip
        self.recorded: list[bool] = []
        """Of plans with drafts: whether all rows have as many, and so many are recorded."""
        if not self.lengths:
            add(self.scheduler, *(make_request(4, max_tokens=1 << 17) for _ in self.rows))

    @property
    def rows(self) -> range:
        return range(self.num_rows)

    def result(self, plan: StepPlan, seconds: float) -> StepResult:
        drafts = drafts_of(plan).num_drafts or (0,) * len(plan.slots)
        counts, verified, proposed = [], [], []
        for slot, num_drafts in zip(plan.slots, drafts, strict=True):
            real = min(num_drafts, self.proposed.get(slot, 0))
            rate, accepted = self.rates[slot % len(self.rates)], 0
            while accepted < real and self.draw.random() < rate:
                accepted += 1
            counts.append(1 + accepted)
            verified.append(real)
            some = self.draw.random() < self.proposing
            number = self.numbers[0] if len(self.numbers) == 1 else self.draw.choice(self.numbers)
            self.proposed[slot] = number if some else 0
            proposed.append(self.proposed[slot])
        if self.device.rests:
            proposed = []
        parts = drafted(proposed=proposed, verified=verified) if self.widths else {}
        ids = [50] * sum(counts)
        return StepResult(plan.step, counts, ids, parts=parts, device_seconds=seconds)

    def run(self, seconds: float) -> float:
        """Return the tokens per second of a stretch, with two steps in flight."""
        self.proposed: dict[int, int] = getattr(self, "proposed", {})
        begin, before = self.now, self.scheduler.stats.generation_tokens
        flying: deque[tuple[StepPlan, float]] = deque()
        while self.now - begin < seconds:
            if self.lengths:
                for _ in self.rows[len(self.scheduler.requests.by_id) :]:
                    most = self.draw.choice(self.lengths)
                    add(self.scheduler, make_request(4, max_tokens=most))
            plan = self.scheduler.schedule()
            if plan is None:
                done, launched = flying.popleft()
                self.now += self.device.seconds(done)
                self.scheduler.update(done, self.result(done, self.now - launched))
                continue
            self.planned.append(sum(drafts_of(plan).num_drafts))
            if self.planned[-1] and not plan.starts:
                self.recorded.append(self.device.recorded(plan))
            flying.append((plan, self.now))
            if len(flying) < 2:
                continue
            done, launched = flying.popleft()
            self.now += self.device.seconds(done)
            self.scheduler.update(done, self.result(done, self.now - launched))
        for done, launched in flying:
            self.now += self.device.seconds(done)
            self.scheduler.update(done, self.result(done, self.now - launched))
        return (self.scheduler.stats.generation_tokens - before) / (self.now - begin)


def speed(
    num_rows: int, rates: list[float], widths: Any, proposing: float = 1.0, **more: Any
) -> float:
    traffic = Traffic(num_rows, rates, proposing, widths, **more)
    traffic.run(0.4)
    return traffic.run(1.2)


def adaptive() -> DraftWidths:
    return DraftWidths(MOST, WIDTHS)


@pytest.mark.parametrize("num_rows", [1, 16, 256])
@pytest.mark.parametrize("proposing", [1.0, 0.3])
def test_text_that_cannot_be_guessed_is_never_slower(num_rows: int, proposing: float) -> None:
    without = speed(num_rows, [0.0], None)
    assert speed(num_rows, [0.02], adaptive(), proposing) >= 0.98 * without


@pytest.mark.parametrize("num_rows", [1, 4, 64])
@pytest.mark.parametrize("token", [0.003, 0.01])
def test_a_device_without_room_is_never_slower(num_rows: int, token: float) -> None:
    """Each draft costs as much as a token. At the start, too: a width is tried in as many steps as
    are in flight, and then wider ones are not."""
    device = Device(token=token)
    plain = max(device.weights, token * num_rows)
    traffic = Traffic(num_rows, [0.02], 1.0, adaptive(), device=device)
    traffic.run(200 * plain)
    assert sum(drafts > 0 for drafts in traffic.planned) <= 6
    without = speed(num_rows, [0.0], None, device=Device(token=token))
    assert traffic.run(1000 * plain) >= 0.98 * without


@pytest.mark.parametrize("num_rows", [16, pytest.param(256, marks=pytest.mark.slow)])
def test_the_search_for_drafts_that_never_pay_rests(num_rows: int) -> None:
    """It may take as long as a tenth of a step, and more than 98 % of the speed is left."""
    device = Device(token=0.0003, search=0.1 * max(0.004, 0.0003 * num_rows))
    without = speed(num_rows, [0.0], None, device=Device(token=0.0003))
    traffic = Traffic(num_rows, [0.1], 1.0, adaptive(), device=device)
    length = 3000 * max(device.weights, device.token * num_rows)
    traffic.run(length)
    assert traffic.run(length) >= 0.98 * without


def test_a_search_that_rests_goes_on_when_there_is_room_again() -> None:
    """Some of the requests end: the others can be guessed, and get drafts at once."""
    traffic = Traffic(64, [0.5], 1.0, adaptive(), device=Device(token=0.0005))
    traffic.run(30.0)
    assert traffic.device.rests
    for request in list(traffic.scheduler.requests.running)[2:]:
        traffic.scheduler.finish_request(request.request_id, "abort")
    before = len(traffic.planned)
    traffic.run(1.0)
    assert not traffic.device.rests and sum(traffic.planned[before : before + 40]) > 20


def test_steps_with_drafts_are_recorded() -> None:
    """Though the number of proposals is another after each step, as with `suffix`, and requests end
    within steps: rows are padded to a recorded width."""
    numbers, lengths = (1, 2, 3, 5, 6, 7, 8), (200, 900, 2000)
    traffic = Traffic(16, [0.9], 0.8, adaptive(), numbers=numbers, lengths=lengths)
    traffic.run(4.0)
    assert len(traffic.recorded) > 300
    assert sum(traffic.recorded) >= 0.9 * len(traffic.recorded)


def test_drafts_after_a_step_without_any_are_foreseen() -> None:
    """A plan is made before the step before it is done, which may propose again: half of those
    after one that did not. A padded step costs nothing here."""
    traffic = Traffic(1, [0.95], 0.5, adaptive())
    traffic.run(2.0)
    assert sum(map(bool, traffic.planned[-200:])) > 190


SIZES = [1, 8, 32, *(pytest.param(many, marks=pytest.mark.slow) for many in (64, 128, 256))]


@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("rate", [0.4, 0.8])
def test_it_is_about_as_fast_as_the_best_width(num_rows: int, rate: float) -> None:
    """Of the fixed ones, which someone would have had to know."""
    fixed = [speed(num_rows, [rate], DraftWidths(width)) for width in WIDTHS]
    best = max(speed(num_rows, [rate], None), *fixed)
    assert speed(num_rows, [rate], adaptive()) >= 0.95 * best


def test_rows_of_one_step_have_widths_of_their_own() -> None:
    """One in four can be guessed; the device is full enough that the others' drafts cost."""
    rates = [0.9, 0.02, 0.02, 0.02]
    without, all_alike = speed(64, rates, None), speed(64, rates, DraftWidths(MOST))
    assert speed(64, rates, adaptive()) > 1.1 * max(without, all_alike)


def test_drafts_come_back_when_they_pay_again() -> None:
    """Once text can be guessed; and once the device has room, as its costs are tried again."""
    traffic = Traffic(16, [0.02], 1.0, adaptive(), device=Device(token=0.0001))
    slow = traffic.run(3.0)
    traffic.rates = [0.9]
    traffic.run(5.0)
    assert traffic.run(1.0) > 1.4 * slow
    traffic = Traffic(16, [0.8], 1.0, adaptive(), device=Device(token=0.0004))
    traffic.run(5.0)
    assert sum(traffic.planned[-100:]) < 100
    traffic.device.token = 0.000005
    traffic.run(10.0)
    assert traffic.run(1.0) > 2 * 16 / 0.004


def test_a_slow_first_step_is_forgiven() -> None:
    """The first step of a width may compile or record: it is tried again."""
    traffic = Traffic(4, [0.9], 1.0, adaptive(), device=Device(weights=0.05))
    traffic.run(0.6)
    plain = speed(4, [0.9], None)
    for width in WIDTHS:
        traffic.widths.took(4, (width,) * 4, 2.0)
    traffic.device.weights = 0.004
    traffic.run(8.0)
    assert traffic.run(1.0) > 2 * plain


@pytest.mark.parametrize(("token", "width"), [(0.00002, 8), (0.003, 0)])
def test_costs_of_the_device_decide_before_the_first_step_with_drafts(
    token: float, width: int
) -> None:
    """Where there is room, the first rows with proposals have all of them; where there is none,
    not even a first try has any, though results show more than the device takes alone."""
    device, widths = Device(token=token), adaptive()
    for each in (0, *WIDTHS):
        widths.foresee(4, each, max(device.weights, token * 4 * (1 + each)) / 3)
    traffic = Traffic(4, [0.9 if width else 0.5], 1.0, widths, device=device)
    traffic.run(0.5)
    drafted = [drafts for drafts in traffic.planned if drafts]
    assert drafted[:1] == [4 * width][: width > 0] and bool(drafted) == bool(width)
    untold = Traffic(4, traffic.rates, 1.0, adaptive(), device=Device(token=token))
    untold.run(0.5)
    assert [drafts for drafts in untold.planned if drafts][:1] != drafted[:1]


def test_a_schedule_caps_the_drafts_of_a_step() -> None:
    schedule = ((1, 2, 8), (4, 9, 1))
    for num_rows, most in ((1, 8), (2, 8), (3, 8), (4, 1), (9, 1), (12, 1)):
        traffic = Traffic(num_rows, [0.9], 1.0, DraftWidths(MOST, schedule=schedule))
        traffic.run(0.2)
        assert max(traffic.planned) == most * num_rows, num_rows
    none = Traffic(4, [0.9], 1.0, DraftWidths(MOST, WIDTHS, schedule=((1, 4, 0),)))
    none.run(1.5)
    assert not any(none.planned)


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ([[2, 4, 1]], "smallest first 1"),
        ([[1, 4, 1], [4, 9, 0]], "overlaps"),
        ([[3, 1, 1]], "first <= last"),
        ([[1, 4, -1]], "drafts >= 0"),
        ([[1, 4]], "num_speculative_tokens_per_batch_size"),
    ],
)
def test_a_wrong_schedule_is_named(schedule: Any, reason: str) -> None:
    options = {"method": "ngram", "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match=reason) as error:
        SpeculativeConfig.read({**options, "num_speculative_tokens_per_batch_size": schedule})
    assert error.value.param == "speculative_config"


def test_widths_that_are_recorded() -> None:
    def widths(most: int, **more: Any) -> tuple[int, ...]:
        options = {"method": "ngram", "num_speculative_tokens": most, **more}
        return SpeculativeConfig.read(options).widths

    assert [widths(most) for most in (1, 2, 5, 24)] == [(1,), (1, 2), (1, 2, 5), (1, 6, 12, 24)]
    fixed: dict[str, Any] = {"adaptive_width": False}
    assert widths(5, **fixed) == (5,)
    fixed["num_speculative_tokens_per_batch_size"] = [[9, 20, 1], [1, 8, 9], [21, 99, 0]]
    assert widths(5, **fixed) == (1, 5)
