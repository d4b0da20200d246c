"""What the scheduler decides, case by case."""

from __future__ import annotations

import pytest
from scheduled import EOS, add, drain, make_request, make_scheduler, run

from jackfield.core.request import Status
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.step import StepResult, TokenLogprobs
from jackfield.plugins.policies.builtin import Priority


def test_short_prompts_are_all_scheduled_in_one_step_in_order():
    scheduler = make_scheduler()
    requests = [make_request(10) for _ in range(10)]
    add(scheduler, *requests)
    assert scheduler.num_waiting == 10
    plan = scheduler.schedule()
    assert plan.num_tokens == (10,) * 10
    assert [start.request_id for start in plan.starts] == [r.request_id for r in requests]
    assert plan.released == ()
    assert [(w.slot, w.column) for w in plan.table_writes] == [(n, 0) for n in range(10)]
    assert plan.samples == (True,) * 10
    assert scheduler.num_running == 10 and scheduler.num_waiting == 0


@pytest.mark.parametrize("caching", [True, False])
def test_long_prefill_threshold_and_budget_cut_prompts_into_chunks(caching):
    scheduler = make_scheduler(long_prefill_token_threshold=400, enable_prefix_caching=caching)
    add(scheduler, *(make_request(800) for _ in range(3)))
    plan = scheduler.schedule()
    assert plan.num_tokens == (400, 400, 224) and plan.samples == (False, False, False)
    assert len(plan.starts) == 3
    assert run(scheduler, plan) == []
    plan = scheduler.schedule()
    assert plan.num_tokens == (400, 400, 224) and plan.samples == (True, True, False)
    assert plan.starts == () and [write.slot for write in plan.table_writes] == [0, 1, 2]
    run(scheduler, plan)
    plan = scheduler.schedule()
    assert plan.num_tokens == (1, 1, 352) and plan.samples == (True, True, True)


def test_without_chunked_prefill_a_prompt_waits_for_room_in_the_budget():
    scheduler = make_scheduler(enable_chunked_prefill=False)
    add(scheduler, make_request(800), make_request(800))
    first = scheduler.schedule()
    assert first.num_tokens == (800,)
    second = scheduler.schedule()
    assert second.num_tokens == (1, 800), "the decode of the first row comes first"


def test_two_steps_in_flight_schedule_the_other_prompt_then_the_pending_token():
    scheduler = make_scheduler(max_num_batched_tokens=512)
    a, b = make_request(512), make_request(512)
    add(scheduler, a, b)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first.num_tokens == (512,) and second.num_tokens == (1, 511)
    scheduler.check_invariants()  # Which brings counters up to date.
    assert a.num_pending_tokens == 2 and a.num_known_tokens == 512
    (update,) = run(scheduler, first, token=7)
    assert (update.request, update.new_token_ids) == (a, [7])


def test_never_scheduled_past_max_tokens_with_steps_in_flight():
    scheduler = make_scheduler()
    request = make_request(4, max_tokens=2)
    add(scheduler, request)
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert scheduler.schedule() is None
    updates = [run(scheduler, plan, token=5)[0] for plan in plans]
    assert [u.finished for u in updates] == [False, True]
    assert request.finish_reason == "length" and request.output_token_ids == [5, 5]


def test_a_request_may_fill_the_context():
    scheduler = make_scheduler(max_model_len=16)
    request = make_request(13, max_tokens=3)
    add(scheduler, request)
    drain(scheduler)
    assert request.num_known_tokens == 16 and request.finish_reason == "length"


def test_a_stop_found_one_step_late_discards_the_extra_token():
    scheduler = make_scheduler()
    request, other = make_request(4), make_request(4)
    add(scheduler, request, other)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update(first, StepResult(first.step, [1, 1], [EOS, 5]))
    assert request.finished and request.finish_reason == "stop" and request.stop_reason is None
    updates = scheduler.update(second, StepResult(second.step, [1, 1], [6, 7]))
    assert [u.request for u in updates] == [other]
    assert request.output_token_ids == [EOS] and other.output_token_ids == [5, 7]
    third = scheduler.schedule()
    assert third.released == (0,) and third.slots == (1,)


@pytest.mark.parametrize(
    ("params", "tokens", "output", "reason"),
    [
        (SamplingParams(max_tokens=9), [10, EOS, 12], [10, EOS], ("stop", None)),
        (
            SamplingParams(max_tokens=9, stop_token_ids=(42, 43)),
            [10, 42, 12],
            [10, 42],
            ("stop", 42),
        ),
        (SamplingParams(max_tokens=2), [10, 11, 12], [10, 11], ("length", None)),
        (
            SamplingParams(max_tokens=3, ignore_eos=True),
            [10, EOS, 11],
            [10, EOS, 11],
            ("length", None),
        ),
        (SamplingParams(max_tokens=9, min_tokens=2), [EOS, EOS, 11], [EOS, EOS], ("stop", None)),
        (
            SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(EOS,)),
            [10, EOS, 11],
            [10, EOS],
            ("stop", EOS),
        ),
    ],
)
def test_stops(params, tokens, output, reason):
    scheduler = make_scheduler()
    request = make_request(params=params)
    add(scheduler, request)
    for token in tokens:
        if (plan := scheduler.schedule()) is not None:
            run(scheduler, plan, token)
    assert request.output_token_ids == output
    assert (request.finish_reason, request.stop_reason) == reason


def test_slot_start_carries_what_the_worker_needs():
    scheduler = make_scheduler()
    params = SamplingParams(max_tokens=4, stop_token_ids=(9,))
    add(scheduler, make_request(prompt=[5, 6, 7], params=params))
    plan = scheduler.schedule()
    (start,) = plan.starts
    assert (start.token_ids, start.num_prompt_tokens, start.num_computed_tokens) == (
        (5, 6, 7),
        3,
        0,
    )
    assert start.stop_token_ids == (EOS, 9) and start.params is params
    (write,) = plan.table_writes
    assert (write.slot, write.group, write.column) == (start.slot, 0, 0)
    assert len(write.block_ids) == 1 and write.block_ids[0] != 0


@pytest.mark.parametrize("state", ["waiting", "running", "in flight", "preempted"])
def test_abort_at_every_state_frees_everything(state):
    scheduler = make_scheduler(num_blocks=5)
    keep, gone = make_request(24, max_tokens=20), make_request(24, max_tokens=20)
    add(scheduler, keep, gone)
    plans = []
    if state != "waiting":
        plans.append(scheduler.schedule())
    if state == "running":
        run(scheduler, plans.pop())
    while state == "preempted" and gone.status is not Status.PREEMPTED:
        run(scheduler, plans.pop())
        plans.append(scheduler.schedule())
    assert scheduler.finish_request(gone.request_id, "abort") is gone
    assert gone.finish_reason == "abort" and gone.block_ids == [] and gone.slot == -1
    scheduler.check_invariants()
    for plan in plans:
        assert all(update.request is keep for update in run(scheduler, plan))
    drain(scheduler)
    assert keep.num_known_tokens == 44
    assert not scheduler.has_work and scheduler.kv.num_used_blocks == 0
    assert scheduler.finish_request(gone.request_id, "abort") is None


def test_preemption_takes_the_last_and_drops_its_token_in_flight():
    scheduler = make_scheduler(num_blocks=11, enable_prefix_caching=False)
    a, b = make_request(80, max_tokens=17), make_request(80, max_tokens=17)
    add(scheduler, a, b)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert b.status is Status.PREEMPTED and second.slots == (0,)
    assert second.released == (1,) and [write.slot for write in second.table_writes] == [0]
    assert (b.epoch, b.num_preemptions, b.num_computed_tokens, b.num_tokens) == (1, 1, 0, 80)
    updates = run(scheduler, first, token=42)
    assert [u.request for u in updates] == [a] and b.output_token_ids == []
    run(scheduler, second, token=43)
    drain(scheduler)
    assert a.finish_reason == b.finish_reason == "length"
    assert scheduler.stats.num_preemptions == 1


def test_preempted_request_resumes_with_its_output_and_hits_its_own_blocks():
    scheduler = make_scheduler(num_blocks=7)
    a, b = make_request(30, max_tokens=30), make_request(30, max_tokens=30)
    add(scheduler, a, b)
    starts = []
    while (plan := scheduler.schedule()) is not None:
        starts += [s for s in plan.starts if s.request_id == b.request_id]
        run(scheduler, plan)
    assert b.num_preemptions == 1 and len(starts) == 2
    resumed = starts[1]
    assert len(resumed.token_ids) > 30 and resumed.num_prompt_tokens == 30
    assert resumed.token_ids[30:] == (50,) * (len(resumed.token_ids) - 30)
    assert len(b.output_token_ids) == 30 and b.num_cached_tokens == 0


def test_resumed_request_longer_than_the_budget_is_chunked_even_without_chunked_prefill():
    scheduler = make_scheduler(
        num_blocks=9, block_size=4, max_num_batched_tokens=12, enable_chunked_prefill=False
    )
    a, b = make_request(5, max_tokens=27), make_request(5, max_tokens=27)
    add(scheduler, a, b)
    drain(scheduler)
    assert b.num_preemptions > 0
    assert len(a.output_token_ids) == len(b.output_token_ids) == 27


def test_priority_admits_the_lowest_value_first_and_by_arrival_among_equals():
    scheduler = make_scheduler(max_num_seqs=1, policy=Priority())
    requests = [make_request(4, max_tokens=1, priority=p) for p in (2, 0, 1, 0, 2)]
    add(scheduler, *requests)
    order = []
    while (plan := scheduler.schedule()) is not None:
        order += [requests.index(u.request) for u in run(scheduler, plan)]
    assert order == [1, 3, 2, 0, 4]


def test_priority_preempts_the_largest_value_though_it_came_first():
    scheduler = make_scheduler(num_blocks=11, policy=Priority(), enable_prefix_caching=False)
    low, high = make_request(80, priority=5), make_request(80, priority=0)
    add(scheduler, low, high)
    run(scheduler, scheduler.schedule())
    scheduler.schedule()
    assert low.status is Status.PREEMPTED and high.status is Status.RUNNING


def test_nobody_is_admitted_in_a_step_that_preempts():
    scheduler = make_scheduler(num_blocks=11, policy=Priority(), enable_prefix_caching=False)
    add(scheduler, make_request(80, priority=1), make_request(80, priority=1))
    run(scheduler, scheduler.schedule())
    urgent = make_request(4, priority=0)
    add(scheduler, urgent)
    plan = scheduler.schedule()
    assert plan.released == (1,) and plan.starts == ()
    assert scheduler.schedule().starts[0].request_id == urgent.request_id


@pytest.mark.parametrize(
    ("options", "request_of", "reason"),
    [
        ({"num_blocks": 4}, {"prompt_len": 40, "max_tokens": 10}, "4 KV-cache blocks; there are 3"),
        ({"max_model_len": 32}, {"prompt_len": 32}, "max_model_len 32"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 20},
            {"prompt_len": 21},
            "max_num_batched_tokens",
        ),
    ],
)
def test_what_can_never_fit_is_refused_with_the_reason(options, request_of, reason):
    scheduler = make_scheduler(**options)
    unfit, fine = make_request(**request_of), make_request(4, max_tokens=1)
    reasons = [
        scheduler.limits.rejection_reason(request.num_prompt_tokens, request.max_total_tokens)
        for request in (unfit, fine)
    ]
    assert reason in reasons[0] and reasons[1] is None
    with pytest.raises(AssertionError, match=reason):
        add(scheduler, unfit)
    assert not scheduler.has_work
    add(scheduler, fine)
    (served,) = run(scheduler, scheduler.schedule())
    assert served.request is fine and served.finished


def test_a_request_that_fills_the_whole_cache_finishes():
    scheduler = make_scheduler(num_blocks=4)
    request = make_request(40, max_tokens=9)
    add(scheduler, request)
    drain(scheduler)
    assert len(request.output_token_ids) == 9 and request.num_preemptions == 0


def test_a_failed_row_fails_its_request_alone_and_its_blocks_are_not_hit():
    scheduler = make_scheduler()
    bad, good = make_request(40, token=3), make_request(40, token=4)
    add(scheduler, bad, good)
    failed, served = run(scheduler, scheduler.schedule(), failed={0: "not a number"})
    assert failed.request is bad and failed.error == "not a number" and failed.finished
    assert bad.finish_reason == "error" and served.request is good and not served.finished
    add(scheduler, make_request(40, token=3))
    assert scheduler.schedule().starts[0].num_computed_tokens == 0
    scheduler.check_invariants()


def test_fail_all_ends_everything_and_forgets_cached_content():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, make_request(40, token=5, max_tokens=1))
    drain(scheduler)
    first = [make_request(40, token=3), make_request(40, token=4)]
    add(scheduler, *first)
    scheduler.schedule()
    updates = scheduler.fail_all("device lost")
    assert [(u.request, u.finished, u.error) for u in updates] == [
        (r, True, "device lost") for r in first
    ]
    assert not scheduler.has_work and scheduler.in_flight == 0
    add(scheduler, make_request(40, token=3))
    plan = scheduler.schedule()
    assert plan.released == (0,) and plan.starts[0].num_computed_tokens == 0
    for token in (4, 5):
        assert scheduler.kv.find_hits(make_request(40, token=token)).num_blocks == 0


def test_prompt_logprobs_are_passed_on_once_though_the_prompt_is_computed_twice():
    scheduler = make_scheduler(num_blocks=5, max_num_batched_tokens=16, max_num_seqs=2)
    a = make_request(30, max_tokens=20)
    b = make_request(20, params=SamplingParams(max_tokens=2, prompt_logprobs=0))
    add(scheduler, a, b)
    computed: dict[int, int] = {}
    ids: dict[int, str] = {}
    actual: list[int] = []
    while (plan := scheduler.schedule()) is not None:
        for start in plan.starts:
            computed[start.slot], ids[start.slot] = start.num_computed_tokens, start.request_id
        entries = {}
        for row, (slot, count) in enumerate(zip(plan.slots, plan.num_tokens, strict=True)):
            first, computed[slot] = computed[slot], computed[slot] + count
            if ids[slot] == b.request_id and first < 19:
                # Stands for prompt token p + 1, as position p tells it.
                entries[row] = [
                    TokenLogprobs(p + 1, -1.0, 1, [], [])
                    for p in range(first, min(first + count, 19))
                ]
        for update in run(scheduler, plan, prompt_logprobs=entries):
            actual += [entry.token_id for entry in update.prompt_logprobs or []]
    assert b.num_preemptions > 0, "the case is not the one meant"
    assert actual == list(range(1, 20))


def test_logprobs_go_to_their_row():
    scheduler = make_scheduler()
    a, b = make_request(4), make_request(4)
    add(scheduler, a, b)
    entry = TokenLogprobs(50, -0.5, 1, [50], [-0.5])
    updates = run(scheduler, scheduler.schedule(), logprobs={1: [entry]})
    assert [u.logprobs for u in updates] == [None, [entry]]


def test_a_slot_is_reused_in_the_plan_that_tells_of_its_release():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, make_request(4, max_tokens=1), make_request(4, max_tokens=1))
    run(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    assert plan.released == (0,) and plan.starts[0].slot == 0


def test_released_slots_go_with_the_next_plan_that_has_rows():
    scheduler = make_scheduler()
    add(scheduler, make_request(4, max_tokens=1))
    run(scheduler, scheduler.schedule())
    assert scheduler.schedule() is None
    add(scheduler, make_request(4))
    assert scheduler.schedule().released == (0,)
    assert scheduler.schedule().released == ()


def test_a_plan_does_not_change_after_it_was_handed_over():
    scheduler = make_scheduler(block_size=1)
    add(scheduler, make_request(4))
    plan = scheduler.schedule()
    (write,) = plan.table_writes
    blocks = write.block_ids
    run(scheduler, plan)
    scheduler.schedule()
    assert plan.table_writes == (write,) and write.block_ids == blocks and len(blocks) == 4


def test_same_id_twice_is_refused():
    scheduler = make_scheduler()
    request = make_request()
    add(scheduler, request)
    with pytest.raises(AssertionError, match=request.request_id):
        scheduler.add_requests(request)


def test_stats_count_tokens_and_endings():
    scheduler = make_scheduler()
    add(scheduler, make_request(10, max_tokens=3), make_request(6, max_tokens=2))
    drain(scheduler)
    stats = scheduler.stats
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps) == (16, 5, 3)
    assert stats.kv_cache_usage == 0.0


def test_invariants_notice_a_leaked_block():
    scheduler = make_scheduler()
    add(scheduler, make_request(40))
    scheduler.schedule()
    scheduler.requests.running.requests[0].block_ids.pop()
    with pytest.raises(AssertionError, match="blocks for 40 tokens"):
        scheduler.check_invariants()
