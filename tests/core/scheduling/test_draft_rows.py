"""What the scheduler decides about drafts, case by case."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from scheduled import EOS, add, drafted, drafts_of, drain, make_request, make_scheduler, run

from jackfield.core.cache.groups import CacheGroup
from jackfield.core.cache.reach import Reach
from jackfield.core.parts.speculation import Rejection
from jackfield.core.step import StepResult, TokenLogprobs
from jackfield.plugins.policies.builtin import Priority


def test_rows_with_drafts_bring_several_tokens_and_those_after_a_stop_are_dropped():
    scheduler = make_scheduler(block_size=4, num_drafts=3)
    stops, ends, rejects, plain = (make_request(4, max_tokens=m) for m in (9, 4, 9, 9))
    add(scheduler, stops, ends, rejects, plain)
    run(scheduler, scheduler.schedule(), parts=drafted(proposed=[3, 2, 1, 0]))
    plan = scheduler.schedule()
    assert plan.slots == (plain.slot, stops.slot, ends.slot, rejects.slot)
    # A request's last token is sampled, and never computed.
    assert drafts_of(plan).num_drafts == (0, 3, 2, 3) and plan.num_tokens == (1, 4, 3, 4)
    assert [len(r.tables[0]) for r in (plain, stops, ends, rejects)] == [2, 2, 2, 2]
    assert (rejects.num_computed_tokens, rejects.num_tokens) == (8, 9)
    ahead = scheduler.schedule()
    assert ahead.slots == (plain.slot, stops.slot, rejects.slot), "the other may be at its end"
    assert len(rejects.tables[0]) == 3
    entries = [TokenLogprobs(token, -1.0, 1, [], []) for token in (5, EOS, 8)]
    result = StepResult(
        plan.step, [1, 3, 3, 1], [6, 5, EOS, 8, 6, 7, 8, 7], logprobs={1: entries},
        parts=drafted(proposed=[0, 3, 3, 3], verified=[0, 3, 2, 1]),
    )  # fmt: skip
    updates = scheduler.update(plan, result)
    assert [u.new_token_ids for u in updates] == [[6], [5, EOS], [6, 7, 8], [7]]
    assert [u.finished for u in updates] == [False, True, True, False]
    assert updates[1].logprobs == entries[:2] and updates[2].logprobs is None
    assert stops.finish_reason == "stop" and ends.finish_reason == "length"
    assert rejects.num_known_tokens == 6 and rejects.num_unverified_tokens == 3
    assert (rejects.num_computed_tokens, rejects.num_tokens) == (9, 10)
    scheduler.check_invariants()
    stats = scheduler.stats
    assert stats.generation_tokens == 4 + 7
    assert stats.spec_decode_num_drafts == 3 and stats.spec_decode_num_draft_tokens == 6
    assert stats.spec_decode_num_accepted_tokens_per_pos == {0: 2, 1: 2, 2: 0}
    run(scheduler, ahead, parts=drafted(proposed=[0, 3, 0]))
    assert (rejects.num_computed_tokens, rejects.num_tokens) == (6, 7)
    assert len(rejects.tables[0]) == 2, "blocks for rejected drafts are taken back"
    plan = scheduler.schedule()
    assert drafts_of(plan).rejections == (Rejection(rejects.slot, 6),)
    assert drafts_of(plan).num_drafts == (), "nothing was proposed"
    run(scheduler, plan)
    drain(scheduler)
    assert rejects.finish_reason == plain.finish_reason == "length"
    assert scheduler.kv.num_used_blocks == 0


def test_each_running_request_gets_a_token_before_any_gets_drafts():
    scheduler = make_scheduler(num_drafts=8, max_num_batched_tokens=12)
    requests = [make_request(3, max_tokens=30) for _ in range(4)]
    add(scheduler, *requests)
    run(scheduler, scheduler.schedule(), parts=drafted(proposed=[8] * 4))
    plan = scheduler.schedule()
    assert plan.total_tokens == 12 and sorted(drafts_of(plan).num_drafts) == [0, 0, 0, 8]


def test_a_prompt_that_comes_first_leaves_drafts_what_is_left():
    """A step never has more tokens than its budget, for which the worker has room."""
    scheduler = make_scheduler(num_drafts=5, max_num_batched_tokens=9, policy=Priority())
    later, first = make_request(1, max_tokens=8, priority=1), make_request(7, priority=0)
    add(scheduler, later)
    run(scheduler, scheduler.schedule(), parts=drafted(proposed=[5]))
    add(scheduler, first)
    run(scheduler, scheduler.schedule(), parts=drafted(proposed=[5, 5]))
    plan = scheduler.schedule()
    assert plan.total_tokens == 9 and sorted(plan.num_tokens) == [4, 5]
    assert sorted(drafts_of(plan).num_drafts) == [0, 4]


def test_drafts_in_flight_count_as_part_of_a_windows_chunk():
    """Blocks before a window go back by the lower bound of the length, so that no request holds
    more of them than the limits say."""
    window = (CacheGroup((0,), Reach(3)),)
    scheduler = make_scheduler(
        block_size=1, groups=window, num_drafts=4, max_num_batched_tokens=6, max_model_len=64
    )
    request = make_request(5, max_tokens=40)
    add(scheduler, request)
    run(scheduler, scheduler.schedule(), parts=drafted(proposed=[4]))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (drafts_of(first).num_drafts, drafts_of(second).num_drafts) == ((4,), (1,))
    most = window[0].most_blocks(request.num_computed_tokens, 1, 6)
    assert sum(map(bool, request.tables[0])) <= most
    run(scheduler, first, parts=drafted(proposed=[4]))
    assert drafts_of(scheduler.schedule()).num_drafts == (4,), "the others were rejected"


def test_without_blocks_for_them_a_row_gets_no_drafts():
    scheduler = make_scheduler(block_size=4, num_blocks=4, num_drafts=4)
    first, second = make_request(4, max_tokens=8), make_request(2, max_tokens=8)
    add(scheduler, first, second)
    run(scheduler, scheduler.schedule(), parts=drafted(proposed=[4, 4]))
    plan = scheduler.schedule()
    assert plan.num_tokens == (1, 1) and drafts_of(plan).num_drafts == ()
    assert first.num_preemptions == second.num_preemptions == 0


def test_a_row_that_should_bring_a_token_and_brings_none_fails_alone():
    scheduler = make_scheduler()
    lost, other = make_request(4), make_request(4)
    add(scheduler, lost, other)
    plan = scheduler.schedule()
    updates = scheduler.update(plan, StepResult(plan.step, [0, 1], [5]))
    assert [u.error for u in updates] == ["the step brought no token for it", None]
    assert lost.finish_reason == "error" and other.output_token_ids == [5]


def calls(function: Callable[..., Any], *args: Any, **more: Any) -> tuple[int, Any]:
    """How many functions it calls, in Python and built in, and what it returns."""
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        result = function(*args, **more)
    finally:
        sys.setprofile(None)
    return count, result


def test_rows_without_drafts_cost_what_they_do_without_speculation():
    """A plan, and its result, look at none of them one by one: also after there were drafts."""
    counted = {}
    for num_drafts in (0, 4):
        scheduler = make_scheduler(num_drafts=num_drafts, max_num_seqs=64)
        add(scheduler, *(make_request(4, max_tokens=400) for _ in range(64)))
        for step in range(40):
            proposed = [3 if step < 9 else 0] * 64
            plan = scheduler.schedule()
            verified = [3] * 64 if drafts_of(plan).num_drafts else []
            run(scheduler, plan, parts=drafted(proposed=proposed, verified=verified))
        assert scheduler.stats.spec_decode_num_draft_tokens == 9 * 64 * 3 * bool(num_drafts)
        counted[num_drafts] = 0
        for _ in range(20):  # More than a block has tokens.
            of_plan, plan = calls(scheduler.schedule)
            of_result, _ = calls(run, scheduler, plan, parts=drafted(proposed=[0] * 64))
            counted[num_drafts] += of_plan + of_result
    assert counted[4] < counted[0] + 20 * 64, counted
