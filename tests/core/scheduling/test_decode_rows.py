"""Steps in which all requests decode: what a plan takes over from the one before it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from scheduled import add, make_request, make_scheduler, run

from jackfield.core.request import Request
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling.queues.decode_rows import has_prompt_left
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import StepPlan


def decoding(count: int, tokens: int = 400, **more: Any) -> tuple[Scheduler, list[Request]]:
    """Requests whose prompts are computed, and end in different places of half a block."""
    scheduler = make_scheduler(max_num_seqs=count, num_blocks=1 + 64 * count, **more)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    requests = [make_request(17 + n % 8, params=params, max_tokens=tokens) for n in range(count)]
    add(scheduler, *requests)
    while any(not request.output_token_ids for request in requests):
        run(scheduler, planned(scheduler))
    return scheduler, requests


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def test_a_plan_repeats_the_rows_of_the_last_one() -> None:
    scheduler, requests = decoding(8)
    plans = [planned(scheduler), planned(scheduler)]
    assert plans[0].slots == tuple(request.slot for request in requests)
    assert plans[1].slots is plans[0].slots and plans[1].samples is plans[0].samples
    scheduler.finish_request(requests[3].request_id, "abort")
    for plan in plans:
        run(scheduler, plan)
    without = planned(scheduler)
    assert (
        without.slots == tuple(r.slot for r in requests if r.slot >= 0) and len(without.slots) == 7
    )


def calls_of(function: Callable[[], object]) -> int:
    """Return how many functions of Python and C are called."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_planning_a_decode_step_costs_nothing_for_a_row_that_needs_nothing() -> None:
    calls: dict[int, set[int]] = {}
    for count in (16, 128):
        scheduler, _ = decoding(count)
        for _ in range(4):
            run(scheduler, planned(scheduler))
        calls[count] = set()
        for _ in range(40):
            plans: list[StepPlan] = []
            number = calls_of(lambda: plans.append(planned(scheduler)))  # noqa: B023
            scheduler.submitted()
            if not plans[0].table_writes:
                calls[count].add(number)
            run(scheduler, plans[0])
    assert calls[16] == calls[128]


def test_a_prompt_whose_last_chunk_is_one_token_is_computed_with_that_step() -> None:
    """Its siblings, which wait for that, come with the same plan: they share its blocks."""
    scheduler = make_scheduler(max_num_batched_tokens=32)
    leader = make_request(33, token=3)
    siblings = [make_request(33, token=3, leader=leader) for _ in range(2)]
    add(scheduler, leader, *siblings)
    run(scheduler, planned(scheduler))
    plan = planned(scheduler)
    assert leader.prompt_computed
    assert plan.total_tokens == 3 and len(plan.slots) == 3


def test_a_request_has_a_prompt_left_until_its_last_token_alone_is() -> None:
    request = make_request(3)
    for computed, left in ((0, True), (2, True), (3, False)):
        request.num_computed_tokens = computed
        request.num_tokens = 4 if computed == 3 else 3
        assert has_prompt_left(request) is left
    request.num_tokens = 5
    assert has_prompt_left(request), "it was preempted, and two of its tokens are to be computed"
