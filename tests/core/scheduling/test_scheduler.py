"""What the scheduler decides, case by case."""

from __future__ import annotations

import pytest

from jackfield.core.cache.groups import CacheGroup
from jackfield.core.request import Request, Status, Update
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling.compression import NEVER, CompressionRule
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import Rejection, StepPlan, StepResult, TokenLogprobs
from jackfield.plugins.policies.builtin import FirstComeFirstServed, Priority

EOS = 2
_numbers = iter(range(10**9))


def make_scheduler(**changes) -> Scheduler:
    options = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "max_model_len": 2048,
        "num_blocks": 1000,
        "block_size": 16,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "policy": FirstComeFirstServed(),
    }
    return Scheduler(**{**options, **changes})


def make_request(prompt_len: int = 10, *, max_tokens: int = 16, token: int | None = None, **more):
    """A prompt of one repeated token, by default one that no other request has."""
    number = next(_numbers)
    params = more.pop("params", None) or SamplingParams(max_tokens=max_tokens)
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=more.pop("prompt", None) or [token or 1000 + number] * prompt_len,
        params=params,
        max_tokens=params.max_tokens or max_tokens,
        seed=0,
        eos_token_ids=frozenset(() if params.ignore_eos else {EOS}),
        arrival=more.pop("arrival", float(number)),
        **more,
    )


def add(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.add_requests(request)


def run(scheduler: Scheduler, plan: StepPlan, token: int = 50, **result) -> list[Update]:
    """The worker's part: every sampling row gets the same token."""
    counts = [int(sampled) for sampled in plan.samples]
    return scheduler.update(plan, StepResult(plan.step, counts, [token] * sum(counts), **result))


def drain(scheduler: Scheduler, token: int = 50) -> None:
    while (plan := scheduler.schedule()) is not None:
        run(scheduler, plan, token)


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


def test_rows_with_drafts_bring_several_tokens_and_those_after_a_stop_are_dropped():
    scheduler = make_scheduler(block_size=4, num_drafts=3)
    stops, ends, rejects, plain = (make_request(4, max_tokens=m) for m in (9, 4, 9, 9))
    add(scheduler, stops, ends, rejects, plain)
    run(scheduler, scheduler.schedule(), proposed=[3, 2, 1, 0])
    plan = scheduler.schedule()
    assert plan.slots == (plain.slot, stops.slot, ends.slot, rejects.slot)
    # A request's last token is sampled, and never computed.
    assert plan.num_drafts == (0, 3, 2, 3) and plan.num_tokens == (1, 4, 3, 4)
    assert [len(r.tables[0]) for r in (plain, stops, ends, rejects)] == [2, 2, 2, 2]
    assert (rejects.num_computed_tokens, rejects.num_tokens) == (8, 9)
    ahead = scheduler.schedule()
    assert ahead.slots == (plain.slot, stops.slot, rejects.slot), "the other may be at its end"
    assert len(rejects.tables[0]) == 3
    entries = [TokenLogprobs(token, -1.0, 1, [], []) for token in (5, EOS, 8)]
    result = StepResult(
        plan.step, [1, 3, 3, 1], [6, 5, EOS, 8, 6, 7, 8, 7], logprobs={1: entries},
        proposed=[0, 3, 3, 3], verified=[0, 3, 2, 1],
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
    run(scheduler, ahead, proposed=[0, 3, 0])
    assert (rejects.num_computed_tokens, rejects.num_tokens) == (6, 7)
    assert len(rejects.tables[0]) == 2, "blocks for rejected drafts are taken back"
    plan = scheduler.schedule()
    assert plan.rejections == (Rejection(rejects.slot, 6),)
    assert plan.num_drafts == (), "nothing was proposed"
    run(scheduler, plan)
    drain(scheduler)
    assert rejects.finish_reason == plain.finish_reason == "length"
    assert scheduler.kv.num_used_blocks == 0


def test_each_running_request_gets_a_token_before_any_gets_drafts():
    scheduler = make_scheduler(num_drafts=8, max_num_batched_tokens=12)
    requests = [make_request(3, max_tokens=30) for _ in range(4)]
    add(scheduler, *requests)
    run(scheduler, scheduler.schedule(), proposed=[8] * 4)
    plan = scheduler.schedule()
    assert plan.total_tokens == 12 and sorted(plan.num_drafts) == [0, 0, 0, 8]


def test_drafts_in_flight_count_as_part_of_a_windows_chunk():
    """Blocks before a window go back by the lower bound of the length, so that no request holds
    more of them than the limits say."""
    window = (CacheGroup((0,), 3),)
    scheduler = make_scheduler(
        block_size=1, groups=window, num_drafts=4, max_num_batched_tokens=6, max_model_len=64
    )
    request = make_request(5, max_tokens=40)
    add(scheduler, request)
    run(scheduler, scheduler.schedule(), proposed=[4])
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (first.num_drafts, second.num_drafts) == ((4,), (1,))
    most = window[0].most_blocks(request.num_computed_tokens, 1, 6)
    assert sum(map(bool, request.tables[0])) <= most
    run(scheduler, first, proposed=[4])
    assert scheduler.schedule().num_drafts == (4,), "the others were rejected"


def test_without_blocks_for_them_a_row_gets_no_drafts():
    scheduler = make_scheduler(block_size=4, num_blocks=4, num_drafts=4)
    first, second = make_request(4, max_tokens=8), make_request(2, max_tokens=8)
    add(scheduler, first, second)
    run(scheduler, scheduler.schedule(), proposed=[4, 4])
    plan = scheduler.schedule()
    assert plan.num_tokens == (1, 1) and plan.num_drafts == ()
    assert first.num_preemptions == second.num_preemptions == 0


def test_a_row_that_should_bring_a_token_and_brings_none_fails_alone():
    scheduler = make_scheduler()
    lost, other = make_request(4), make_request(4)
    add(scheduler, lost, other)
    plan = scheduler.schedule()
    updates = scheduler.update(plan, StepResult(plan.step, [0, 1], [5]))
    assert [u.error for u in updates] == ["the step brought no token for it", None]
    assert lost.finish_reason == "error" and other.output_token_ids == [5]


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


# ---------------------------------------------------------------- KV compression


def test_a_compaction_frees_its_blocks_in_the_plan_that_carries_it():
    scheduler = make_scheduler(kv_compression=CompressionRule(ratio=0.25))
    request = make_request(160, max_tokens=40)
    add(scheduler, request)
    run(scheduler, scheduler.schedule())
    used, old = scheduler.kv.num_used_blocks, request.block_ids
    plan = scheduler.schedule()
    (compaction,) = plan.compactions
    assert (compaction.slot, compaction.num_tokens, compaction.kept) == (0, 160, 40)
    assert compaction.block_ids == tuple(request.block_ids) and len(request.block_ids) == 3
    assert not set(old) & set(request.block_ids)
    assert used == 10 and scheduler.kv.num_used_blocks == 3 and plan.table_writes == ()
    assert (request.num_computed_tokens, request.num_kv_tokens) == (161, 41)
    scheduler.check_invariants()
    run(scheduler, plan)
    drain(scheduler)
    assert len(request.output_token_ids) == 40 and scheduler.kv.num_used_blocks == 0
    assert scheduler.stats.kv_compactions == 1 and scheduler.stats.kv_blocks_returned == 7


def test_what_others_hold_is_not_counted_as_freed():
    """Their prompt is shared but for its last block, and a compaction would only take more."""
    scheduler = make_scheduler(kv_compression=CompressionRule(ratio=0.5))
    first, second = make_request(161, token=7), make_request(161, token=7)
    add(scheduler, first)
    run(scheduler, scheduler.schedule())
    add(scheduler, second)
    first.compact_at = NEVER
    drain(scheduler)
    assert second.num_cached_tokens == 160
    assert scheduler.stats.kv_compactions == 0
    assert not (first.compacted or second.compacted)


def test_a_preempted_request_has_its_whole_cache_again():
    scheduler = make_scheduler(kv_compression=CompressionRule(ratio=0.25), num_blocks=14)
    first, second = make_request(64, max_tokens=100), make_request(64, max_tokens=100)
    add(scheduler, first, second)
    while not second.num_preemptions:
        run(scheduler, scheduler.schedule())
        scheduler.check_invariants()
    assert second.status is Status.PREEMPTED
    assert (second.compacted, second.num_dropped_tokens, second.num_kv_tokens) == (False, 0, 0)
    drain(scheduler)
    assert [len(r.output_token_ids) for r in (first, second)] == [100, 100]
    assert scheduler.stats.kv_compactions == 3


def test_a_failed_request_takes_its_names_back_though_its_blocks_are_released():
    scheduler = make_scheduler(kv_compression=CompressionRule(ratio=0.25))
    request = make_request(160, token=9)
    add(scheduler, request)
    run(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    assert plan.compactions
    run(scheduler, plan, failed={0: "on purpose"})
    assert not scheduler.kv.find_hits(make_request(160, token=9)).num_blocks


def compressing(num_blocks: int = 101, **rule) -> Scheduler:
    return make_scheduler(kv_compression=CompressionRule(**rule), num_blocks=num_blocks)


def test_a_budget_and_an_interval_bound_a_long_generation():
    """32 tokens stay, and 32 more come until the next compaction: 4 blocks of 16, and a copy."""
    scheduler = compressing(budget=32, interval=32)
    request = make_request(20, max_tokens=300)
    add(scheduler, request)
    most = 0
    while scheduler.has_work:
        run(scheduler, scheduler.schedule())
        scheduler.check_invariants()
        most = max(most, scheduler.kv.num_used_blocks)
    assert len(request.output_token_ids) == 300 and most <= 5
    stats = scheduler.stats
    # 20 prompt tokens and 300 generated, of which the last is not computed.
    assert stats.kv_tokens_dropped == request.num_compactions * 32 - (32 - 20)
    assert stats.kv_compactions == request.num_compactions >= 8


def test_a_prompt_is_compacted_while_it_is_computed():
    """At most 64 of 320 tokens stay, and 64 more come: 8 blocks and a copy of 4, for each."""
    scheduler = compressing(num_blocks=26, ratio=0.2, prompt_interval=64)
    requests = [make_request(320, max_tokens=20, token=n) for n in range(4)]
    add(scheduler, *requests)
    places, most = [], 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        places += [(each.num_tokens, each.kept) for each in plan.compactions if each.slot == 0]
        run(scheduler, plan)
        scheduler.check_invariants()
        most = max(most, scheduler.num_running)
    # 26 tokens stay of 128, 39 of 192, 52 of 256; the first stretch of all is cut to 16.
    assert places[:5] == [(64, 16), (80, 26), (90, 39), (103, 52), (116, 64)]
    assert most >= 3 and scheduler.stats.num_preemptions == 0
    assert [len(request.output_token_ids) for request in requests] == [20] * 4


@pytest.mark.parametrize("prompt_interval", [0, 64])
def test_a_preempted_request_is_compacted_where_it_was_before(prompt_interval):
    rule = CompressionRule(ratio=0.25, interval=10, prompt_interval=prompt_interval)
    scheduler = make_scheduler(kv_compression=rule, enable_prefix_caching=False)
    request = make_request(160, max_tokens=60)
    add(scheduler, request)
    places: list[list[tuple[int, int]]] = [[]]
    while scheduler.has_work:
        if len(places) == 1 and len(request.output_token_ids) == 27:
            scheduler.requests.preempt(request)
            places.append([])
        plan = scheduler.schedule()
        for each in plan.compactions:
            places[-1].append((request.num_dropped_tokens + each.kept, each.kept))
        run(scheduler, plan)
        scheduler.check_invariants()
    before, after = places
    assert len(before) >= 3 and after[: len(before)] == before


def test_most_tokens_of_a_cache_are_those_that_it_holds():
    rules = [
        CompressionRule(ratio=0.3), CompressionRule(ratio=0.3, prompt_interval=50),
        CompressionRule(budget=40, prompt_interval=7, interval=9),
        CompressionRule(ratio=0.6, interval=30), CompressionRule(ratio=0.5, on_pressure=True),
    ]  # fmt: skip
    for rule in rules:
        for prompt, length in ((20, 20), (200, 200), (200, 201), (200, 320), (49, 350)):
            held = computed = most = 0
            place = NEVER if rule.on_pressure else rule.next_place(0, prompt)
            while computed < length:
                if computed == place:
                    held, place = (
                        min(held, rule.kept_tokens(computed)), rule.next_place(computed, prompt),
                    )  # fmt: skip
                end = min(place, length)
                held, computed = held + end - computed, end
                most = max(most, held)
            assert rule.most_tokens(prompt, length) == most, (rule, prompt, length)


def test_a_request_may_have_a_rule_of_its_own():
    params = ({"ratio": 0.25}, {"budget": 48}, "off", None)
    kept = []
    for value in params:
        scheduler = compressing(ratio=0.5)
        sampling = SamplingParams(max_tokens=5, kv_compression=value)  # type: ignore[arg-type]
        request = make_request(160, params=sampling)
        add(scheduler, request)
        run(scheduler, scheduler.schedule())
        kept += [each.kept for each in scheduler.schedule().compactions] or [160]
    assert kept == [40, 48, 160, 80]


def test_under_pressure_caches_are_compacted_before_a_request_is_preempted():
    requests = [make_request(64, max_tokens=40, token=n) for n in range(2)]
    pressed = compressing(num_blocks=10, ratio=0.25, on_pressure=True)
    whole = make_scheduler(num_blocks=10)
    for scheduler, own in ((pressed, requests), (whole, [make_request(64, max_tokens=40, token=n)
                                                         for n in range(2)])):  # fmt: skip
        add(scheduler, *own)
        drain(scheduler)
        assert [len(request.output_token_ids) for request in own] == [40, 40]
    assert whole.stats.num_preemptions > 0 and pressed.stats.num_preemptions == 0
    assert pressed.stats.kv_compactions >= 1
    relaxed = compressing(ratio=0.25, on_pressure=True)
    add(relaxed, make_request(64, max_tokens=40))
    drain(relaxed)
    assert relaxed.stats.kv_compactions == 0, "there was no pressure"


def test_under_pressure_caches_are_compacted_to_admit_a_request():
    scheduler = compressing(num_blocks=12, ratio=0.25, on_pressure=True)
    first, second = make_request(128, max_tokens=20, token=1), make_request(64, token=2)
    add(scheduler, first)
    run(scheduler, scheduler.schedule())
    add(scheduler, second)
    plans = [scheduler.schedule()]
    run(scheduler, plans[0])
    assert second.status is Status.WAITING and not plans[0].compactions
    plan = scheduler.schedule()
    assert [each.slot for each in plan.compactions] == [first.slot]
    assert [start.request_id for start in plan.starts] == [second.request_id]
    run(scheduler, plan)
    drain(scheduler)


def test_a_starved_pool_compacts_in_place_and_takes_the_names():
    """9 blocks of 9 are taken: the 3 that stay are the first of the request's own."""
    scheduler = compressing(num_blocks=10, ratio=0.3)
    request = make_request(130, max_tokens=8, token=3)
    add(scheduler, request)
    run(scheduler, scheduler.schedule())
    assert scheduler.kv.pool.num_free == 0
    old = request.block_ids[:]
    plan = scheduler.schedule()
    (compaction,) = plan.compactions
    assert compaction.block_ids == tuple(old[:3]) and scheduler.kv.num_used_blocks == 3
    assert not scheduler.kv.find_hits(make_request(130, token=3)).num_blocks
    run(scheduler, plan)
    scheduler.check_invariants()
    drain(scheduler)


def test_no_compaction_writes_what_another_of_its_plan_reads():
    """The second one's fresh blocks would be those that the first has just released."""
    scheduler = compressing(num_blocks=19, ratio=0.3)
    requests = [make_request(128, max_tokens=8, token=n) for n in range(2)]
    add(scheduler, *requests)
    run(scheduler, scheduler.schedule())
    old = [request.block_ids[:] for request in requests]
    plan = scheduler.schedule()
    assert len(plan.compactions) == 2
    for number, compaction in enumerate(plan.compactions):
        assert not set(compaction.block_ids) & set(old[1 - number])
    run(scheduler, plan)
    scheduler.check_invariants()
    drain(scheduler)
