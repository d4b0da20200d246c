"""Pooling requests in the scheduler: one vector each, with a cache and without one."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.core.pooling_params import PooledRow, PoolingParams
from jackfield.core.request import Request, Update
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import StepPlan, StepResult
from jackfield.plugins.policies.builtin import FirstComeFirstServed


def make_scheduler(**changes: Any) -> Scheduler:
    options = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 101,
        "num_blocks": 30,
        "block_size": 4,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "policy": FirstComeFirstServed(),
    }
    return Scheduler(**{**options, **changes})


def encoder(**changes: Any) -> Scheduler:
    return make_scheduler(num_blocks=0, enable_chunked_prefill=False, **changes)


def make_request(name: str, length: int, **more: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[7] * length,
        params=SamplingParams(max_tokens=1),
        max_tokens=1,
        seed=0,
        pooling=PoolingParams(task="embed"),
        **more,
    )


def run(scheduler: Scheduler, plan: StepPlan, **result: Any) -> list[Update]:
    """The worker's part: a vector of the row's number for each prompt that ends."""
    pooled = {
        row: PooledRow((1,), struct.pack("f", row))
        for row, ends in enumerate(plan.samples)
        if ends and row not in result.get("failed", {})
    }
    counts = [0] * len(plan.slots)
    return scheduler.update(plan, StepResult(plan.step, counts, [], pooled=pooled, **result))


def test_the_vector_comes_with_the_last_chunk_and_ends_the_request() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 100)
    scheduler.add_requests(request)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first is not None and second is not None
    assert (first.num_tokens, first.samples) == ((64,), (False,))
    assert (second.num_tokens, second.samples) == ((36,), (True,))
    assert first.starts[0].pooling == PoolingParams(task="embed")
    assert scheduler.schedule() is None, "nothing comes after the vector"
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(first), type=StepPlan)
    assert decoded == first, "a plan can travel to another process"
    assert run(scheduler, first) == []
    [update] = run(scheduler, second)
    assert update.pooled is not None and update.pooled.array().tolist() == [0.0]
    assert update.finished and update.new_token_ids == [] and request.finish_reason == "stop"
    scheduler.check_invariants()
    assert scheduler.stats.kv_blocks_used == 0 and scheduler.stats.generation_tokens == 0


@pytest.mark.parametrize("cached", [True, False])
def test_only_requests_that_may_read_the_cache_find_what_is_in_it(cached: bool) -> None:
    scheduler = make_scheduler()
    for name in ("a", "b"):
        scheduler.add_requests(make_request(name, 20, reads_cache=cached))
        plan = scheduler.schedule()
        assert plan is not None
        assert plan.total_tokens == (4 if cached and name == "b" else 20)
        run(scheduler, plan)


def test_the_vector_of_a_request_that_has_ended_is_dropped() -> None:
    scheduler = make_scheduler()
    scheduler.add_requests(make_request("a", 5))
    scheduler.add_requests(make_request("b", 6))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.finish_request("a", "abort")
    assert [update.request.request_id for update in run(scheduler, plan)] == ["b"]
    scheduler.check_invariants()


def test_results_travel() -> None:
    row = PooledRow((2,), struct.pack("2f", 1.0, -0.5))
    result = StepResult(3, [0], [], pooled={0: row})
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult)
    assert decoded.pooled[0].array().tolist() == [1.0, -0.5]


def test_a_row_that_fails_takes_no_other_with_it() -> None:
    scheduler = encoder()
    for name in ("a", "b"):
        scheduler.add_requests(make_request(name, 5))
    plan = scheduler.schedule()
    assert plan is not None
    first, second = run(scheduler, plan, failed={0: "NaN"})
    assert (first.error, first.pooled, first.request.finish_reason) == ("NaN", None, "error")
    assert second.error is None and second.pooled is not None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=20),
    st.sets(st.integers(0, 19)),
)
def test_without_a_cache_prompts_run_whole_and_hold_no_block(
    lengths: list[int], aborted: set[int]
) -> None:
    scheduler = encoder()
    for number, length in enumerate(lengths):
        scheduler.add_requests(make_request(str(number), length))
    assert scheduler.stats.kv_blocks_total == 0
    complete: list[str] = []
    while (plan := scheduler.schedule()) is not None:
        assert all(plan.samples) and plan.total_tokens <= 64
        assert plan.table_writes == ()
        assert len(plan.starts) == len(plan.slots), "every row begins and ends in one step"
        for number in aborted:
            scheduler.finish_request(str(number), "abort")
        complete += [update.request.request_id for update in run(scheduler, plan)]
        scheduler.check_invariants()
    assert set(complete) | {str(n) for n in aborted} >= {str(n) for n in range(len(lengths))}
    assert not scheduler.has_work and scheduler.stats.kv_cache_usage == 0.0
    assert scheduler.reset_prefix_cache()


def test_a_prompt_that_no_step_can_take_is_told_why() -> None:
    reason = encoder().limits.rejection_reason(65, 66)
    assert reason is not None and "max_num_batched_tokens" in reason
    assert encoder(max_num_batched_tokens=100).limits.rejection_reason(100, 101) is None
