"""What the scheduler lets requests share, case by case: prefix hits, and siblings of a leader."""

from __future__ import annotations

import pytest
from scheduled import add, drain, make_request, make_scheduler, run

from jackfield.core.sampling_params import SamplingParams


def test_prefix_hits_leave_one_token_to_compute_and_are_counted():
    scheduler = make_scheduler()
    first, second = make_request(64, token=3, max_tokens=1), make_request(64, token=3, max_tokens=1)
    add(scheduler, first)
    drain(scheduler)
    add(scheduler, second)
    (start,) = scheduler.schedule().starts
    assert start.num_computed_tokens == 48 == second.num_cached_tokens
    stats = scheduler.stats
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (128, 48)


def test_prefix_hits_within_one_step():
    scheduler = make_scheduler()
    add(scheduler, make_request(40, token=3), make_request(40, token=3))
    plan = scheduler.schedule()
    assert plan.num_tokens == (40, 8)
    assert plan.table_writes[0].block_ids[:2] == plan.table_writes[1].block_ids[:2]


@pytest.mark.parametrize(
    "more",
    [
        {"cache_salt": "b"},
        {"cache_extra": ("adapter",)},
        {"params": SamplingParams(max_tokens=1, prompt_logprobs=0)},
    ],
)
def test_no_hits_across_salts_extras_or_with_prompt_logprobs(more):
    scheduler = make_scheduler()
    add(scheduler, make_request(40, token=3, cache_salt="a"))
    add(scheduler, make_request(40, token=3, **{"cache_salt": "a", **more}))
    assert scheduler.schedule().num_tokens == (40, 40)


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_wait_for_the_leader_then_share_its_blocks(caching):
    scheduler = make_scheduler(max_num_batched_tokens=32, enable_prefix_caching=caching)
    leader = make_request(40, token=3)
    siblings = [make_request(40, token=3, leader=leader) for _ in range(2)]
    stranger = make_request(8)
    add(scheduler, leader, *siblings, stranger)
    run(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    assert [s.request_id for s in plan.starts] == [r.request_id for r in (*siblings, stranger)]
    assert plan.num_tokens == (8, 8, 8, 8)
    assert siblings[0].block_ids[:2] == siblings[1].block_ids[:2] == leader.block_ids[:2]
    scheduler.check_invariants()


def test_others_pass_a_sibling_whose_leader_is_not_done():
    scheduler = make_scheduler(long_prefill_token_threshold=16)
    leader = make_request(40, token=3)
    sibling, stranger = make_request(40, token=3, leader=leader), make_request(8)
    add(scheduler, leader, sibling, stranger)
    plan = scheduler.schedule()
    assert [s.request_id for s in plan.starts] == [leader.request_id, stranger.request_id]
    scheduler.finish_request(leader.request_id, "abort")
    run(scheduler, plan)
    assert [s.request_id for s in scheduler.schedule().starts] == [sibling.request_id]


def test_without_prefix_caching_strangers_share_nothing():
    scheduler = make_scheduler(enable_prefix_caching=False)
    leader = make_request(40, token=3)
    add(scheduler, leader, make_request(40, token=3, leader=leader), make_request(40, token=3))
    other = make_request(40, token=3)
    add(scheduler, other, make_request(40, token=3, leader=other))
    assert scheduler.schedule().num_tokens == (40, 8, 40, 40, 8)
