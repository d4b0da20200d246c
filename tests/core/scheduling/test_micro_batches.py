"""Requests take turns at the stages of a pipeline, so that all stages have work."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable

import pytest
from scheduled import add, make_request, make_scheduler, run

from jackfield.core.request import Request
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling.parts.pipeline import Pipeline
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import StepPlan

LATENCY = 0.4
"""Of the host, in the time that a stage takes for a step: from a result to the next plan."""


class Stages:
    """A pipeline in which every stage takes a tick for every step. A step's rows begin when the
    first stage has their last tokens, which the last stage has sampled."""

    def __init__(self, scheduler: Scheduler, count: int) -> None:
        self.scheduler, self.count = scheduler, count
        self.free = [0.0] * count
        """When each stage is done with the step before."""
        self.sampled: dict[int, float] = {}
        """Slot → when its last token was."""
        self.now = 0.0
        self.in_flight: deque[tuple[StepPlan, float]] = deque()
        self.idle: list[float] = []
        """Ticks that the first stage has waited for each step, since it was done with the last."""
        self.at_submit: list[int] = []
        """Steps in flight, each new one included."""

    def micro_batch(self, request: Request) -> int | None:
        part = self.scheduler.part(Pipeline)
        assert part is not None
        return part.micro_batch(request)

    def fill(self) -> None:
        while len(self.in_flight) <= self.count and (plan := self.scheduler.schedule()) is not None:
            self.scheduler.check_invariants()
            for start in plan.starts:
                self.sampled.pop(start.slot, None)
            begin = max([self.now, self.free[0], *(self.sampled.get(s, 0.0) for s in plan.slots)])
            self.idle.append(begin - self.free[0])
            end = begin
            for stage in range(self.count):
                end = self.free[stage] = max(end, self.free[stage]) + 1.0
            self.sampled |= {
                s: end for s, samples in zip(plan.slots, plan.samples, strict=True) if samples
            }
            self.in_flight.append((plan, end))
            self.at_submit.append(len(self.in_flight))

    def step(self) -> StepPlan | None:
        """Take the result of the first step in flight; None: there is none."""
        self.fill()
        if not self.in_flight:
            return None
        plan, end = self.in_flight.popleft()
        self.now = max(self.now, end) + LATENCY
        run(self.scheduler, plan)
        return plan


def decoding(
    count: int, num_stages: int, tokens: int = 60, **more: int
) -> tuple[Stages, list[Request]]:
    scheduler = make_scheduler(num_stages=num_stages, **more)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = [make_request(params=params, max_tokens=tokens) for _ in range(count)]
    add(scheduler, *requests)
    return Stages(scheduler, num_stages), requests


def drained(stages: Stages, between: Callable[[int], None] = lambda number: None) -> int:
    """Serve all requests, and return the number of steps."""
    number = 0
    while stages.step() is not None:
        between(number)
        number += 1
        assert number < 5000, "requests do not end"
    return number


@pytest.mark.parametrize(
    ("num_stages", "count"), [(2, 2), (2, 3), (2, 16), (3, 3), (3, 7), (4, 4), (4, 13), (8, 8)]
)
def test_no_stage_waits_in_steady_decode(num_stages: int, count: int) -> None:
    stages, requests = decoding(count, num_stages)
    while len(requests[-1].output_token_ids) < 5:
        stages.step()
    begun = len(stages.idle)
    while len(requests[0].output_token_ids) < 50:
        stages.step()
    assert len(stages.idle) - begun >= 44 * num_stages
    assert set(stages.idle[begun:]) == {0.0}
    assert set(stages.at_submit[begun:]) == {num_stages + 1}
    first = [stages.micro_batch(r) for r in requests].count(0)
    assert first in (count // num_stages, -(-count // num_stages))


@pytest.mark.parametrize(("num_stages", "count"), [(2, 1), (3, 1), (4, 3)])
def test_fewer_requests_than_stages_are_never_in_a_step_twice_or_forgotten(
    num_stages: int, count: int
) -> None:
    """Each is computed as soon as its last token is there, not a result's way later."""
    stages, requests = decoding(count, num_stages, tokens=20)
    steps = drained(stages)
    assert steps <= 1 + 19 * count
    assert all(len(r.output_token_ids) == 20 for r in requests)
    assert stages.free[-1] <= 20 * num_stages + count


def test_micro_batches_are_made_even_when_requests_end() -> None:
    """Three of four end while they are in one micro-batch, and two have work all the same."""
    stages, requests = decoding(6, 2, tokens=90)
    while len(requests[-1].output_token_ids) < 5:
        stages.step()
    for request in [r for r in requests if stages.micro_batch(r) == 1]:
        stages.scheduler.finish_request(request.request_id, "abort")
    left = [r for r in requests if r.finish_reason is None]
    known = len(left[0].output_token_ids)
    while len(left[0].output_token_ids) < known + 6:
        stages.step()
    begun = len(stages.idle)
    while len(left[0].output_token_ids) < 80:
        stages.step()
    assert {stages.micro_batch(r) for r in left} == {0, 1} and set(stages.idle[begun:]) == {0.0}


def test_chunks_of_a_prompt_go_into_every_step() -> None:
    """Beside a request that decodes at its turns only."""
    stages, (first,) = decoding(1, 2, tokens=200, long_prefill_token_threshold=100)
    while len(first.output_token_ids) < 5:
        stages.step()
    add(stages.scheduler, make_request(1800))
    begun = len(stages.idle)
    plans = [plan for _ in range(18) if (plan := stages.step()) is not None]
    chunks = [plan for plan in plans if 100 in plan.num_tokens]
    assert len(chunks) >= 15
    decodes = [plan.step for plan in chunks if 1 in plan.num_tokens]
    assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(decodes))
    assert set(stages.idle[begun + 4 : begun + 16]) == {0.0}


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_ends(seed: int) -> None:
    """With preemptions, aborts, and lanes that become uneven again and again."""
    draw = random.Random(seed)
    scheduler = make_scheduler(
        num_stages=2 + seed % 3, num_blocks=30, max_num_seqs=8, max_num_batched_tokens=40
    )
    stages, live = Stages(scheduler, 2 + seed % 3), []

    def traffic(number: int) -> None:
        if number < 150 and draw.random() < 0.4:
            tokens = draw.randrange(1, 40)
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            live.append(make_request(draw.randrange(1, 120), params=params, max_tokens=tokens))
            add(scheduler, live[-1])
        if live and draw.random() < 0.05:
            scheduler.finish_request(draw.choice(live).request_id, "abort")
        scheduler.check_invariants()

    traffic(0)
    add(scheduler, make_request(5))
    drained(stages, traffic)
    assert len(live) > 20 and all(request.finish_reason for request in live)
    assert all(len(r.output_token_ids) == r.max_tokens for r in live if r.finish_reason == "length")
    assert scheduler.stats.num_preemptions > 0
