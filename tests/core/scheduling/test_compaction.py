"""What the scheduler decides about compacting caches, case by case."""

from __future__ import annotations

import pytest
from scheduled import add, compactions_of, drain, make_request, make_scheduler, run

from jackfield.core.cache.compacted_tables import CompactedTables
from jackfield.core.cache.groups import CacheGroup
from jackfield.core.cache.kv_manager import KVCacheManager
from jackfield.core.cache.reach import Reach
from jackfield.core.request import NEVER, Status
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling.parts.kv_compression import MIN_KEPT, CompressionRule
from jackfield.core.scheduling.row_planner import RowPlanner
from jackfield.core.scheduling.scheduler import Scheduler


def test_a_compaction_frees_its_blocks_in_the_plan_that_carries_it():
    scheduler = make_scheduler(kv_compression=CompressionRule(ratio=0.25))
    request = make_request(160, max_tokens=40)
    add(scheduler, request)
    run(scheduler, scheduler.schedule())
    used, old = scheduler.kv.num_used_blocks, request.block_ids
    plan = scheduler.schedule()
    (compaction,) = compactions_of(plan)
    assert (compaction.slot, compaction.num_tokens, compaction.kept) == (0, 160, 40)
    assert compaction.tables[0] == tuple(request.block_ids) and len(request.block_ids) == 3
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
    whole = SamplingParams(max_tokens=16, kv_compression="off")  # type: ignore[arg-type]
    first, second = make_request(161, token=7, params=whole), make_request(161, token=7)
    add(scheduler, first)
    run(scheduler, scheduler.schedule())
    add(scheduler, second)
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
    assert compactions_of(plan)
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
    assert request.compression_usage is not None
    num_compactions = request.compression_usage.compactions
    assert stats.kv_tokens_dropped == num_compactions * 32 - (32 - 20)
    assert stats.kv_compactions == num_compactions >= 8


def test_a_prompt_is_compacted_while_it_is_computed():
    """At most 64 of 320 tokens stay, and 64 more come: 8 blocks and a copy of 4, for each."""
    scheduler = compressing(num_blocks=26, ratio=0.2, prompt_interval=64)
    requests = [make_request(320, max_tokens=20, token=n) for n in range(4)]
    add(scheduler, *requests)
    places, most = [], 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        places += [(each.num_tokens, each.kept) for each in compactions_of(plan) if each.slot == 0]
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
        for each in compactions_of(plan):
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
            found = rule.most_tokens(prompt, length, lambda kept: kept)
            assert found == most, (rule, prompt, length)


@pytest.mark.parametrize(
    "groups",
    [
        (CacheGroup((0,)), CacheGroup((1,), Reach(37))),
        (CacheGroup((0,)), CacheGroup((1,), Reach(chunk_size=24)), CacheGroup((2,), Reach(50))),
        (CacheGroup((0, 1), None, (Reach(chunk_size=10, chunk_lookback=1),)),),
    ],
)
def test_what_the_next_token_sees_in_a_window_or_in_chunks_stays(groups):
    tables = CompactedTables(KVCacheManager(10, 16, True, groups=groups))
    reaches = [each for g in groups for each in (g.reach, *g.inner_reaches) if each is not None]
    units = [each.chunk_size for each in reaches if each.chunk_size] + [16] * (len(groups) > 1)
    dropped = set()
    for num_tokens in range(16, 300, 7):
        for kept in range(16, num_tokens, 9):
            length = tables.possible_length(num_tokens, kept)
            assert kept <= length <= min(num_tokens, tables.most_after(kept))
            dropped.add(num_tokens - length)
            assert all((num_tokens - length) % unit == 0 for unit in units)
            seen = min(each.first_visible(num_tokens) for each in reaches)
            assert length == num_tokens or num_tokens - length <= seen
    assert len(dropped) > 3


@pytest.mark.parametrize("threshold", [1.0, 0.5])
def test_a_share_of_used_blocks_starts_compactions(threshold):
    """40 blocks, of which two requests come to use 27. Once more than 20 are, the cache from which
    most come back is compacted before the next rows; cached blocks that none uses do not count."""
    scheduler = compressing(num_blocks=41, ratio=0.5, on_pressure=True, threshold=threshold)
    warm = make_request(200, max_tokens=1)
    add(scheduler, warm)
    drain(scheduler)
    add(scheduler, make_request(160, max_tokens=60), make_request(130, max_tokens=60))
    used = 0
    while scheduler.has_work:
        run(scheduler, scheduler.schedule())
        used = max(used, scheduler.kv.num_used_blocks)
        scheduler.check_invariants()
    early = threshold < 1
    assert used <= 22 if early else used > 24
    assert bool(scheduler.stats.kv_compactions) == early and not scheduler.stats.num_preemptions


def test_a_request_may_have_a_rule_of_its_own():
    params = ({"ratio": 0.25}, {"budget": 48}, "off", None)
    kept = []
    for value in params:
        scheduler = compressing(ratio=0.5)
        sampling = SamplingParams(max_tokens=5, kv_compression=value)  # type: ignore[arg-type]
        request = make_request(160, params=sampling)
        add(scheduler, request)
        run(scheduler, scheduler.schedule())
        kept += [each.kept for each in compactions_of(scheduler.schedule())] or [160]
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
    assert second.status is Status.WAITING and not compactions_of(plans[0])
    plan = scheduler.schedule()
    assert [each.slot for each in compactions_of(plan)] == [first.slot]
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
    (compaction,) = compactions_of(plan)
    assert compaction.tables[0] == tuple(old[:3]) and scheduler.kv.num_used_blocks == 3
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
    assert len(compactions_of(plan)) == 2
    for number, compaction in enumerate(compactions_of(plan)):
        assert not set(compaction.tables[0]) & set(old[1 - number])
    run(scheduler, plan)
    scheduler.check_invariants()
    drain(scheduler)


def test_half_of_the_tokens_stay_unless_the_rule_says_otherwise() -> None:
    assert CompressionRule().kept_tokens(101) == 51
    assert CompressionRule().kept_tokens(20) == MIN_KEPT
    assert CompressionRule(budget=40).kept_tokens(101) == 40
    assert CompressionRule(ratio=1.0).kept_tokens(9) == 9


def test_windows_of_decoding_requests_are_not_counted_as_those_of_prompts():
    """Three caches hold 51 blocks each, and 2 of the window's, and may take a few more; another
    prompt takes 200 and 67. In 499 blocks there is room."""
    scheduler = make_scheduler(
        kv_compression=CompressionRule(ratio=0.25), num_blocks=500, max_model_len=4096,
        groups=(CacheGroup((0,)), CacheGroup((1,), Reach(16))),
    )  # fmt: skip
    requests = [make_request(3200, max_tokens=500) for _ in range(3)]
    for request in requests:
        add(scheduler, request)
        while not request.compacted:
            run(scheduler, scheduler.schedule())
    assert scheduler.kv.num_used_blocks < 3 * 55
    last = make_request(3200, max_tokens=500)
    add(scheduler, last)
    run(scheduler, scheduler.schedule())
    scheduler.check_invariants()
    assert last.status is Status.RUNNING and scheduler.num_running == 4


@pytest.mark.parametrize(
    "rule", [CompressionRule(ratio=1.0), CompressionRule(on_pressure=True), CompressionRule()]
)
def test_plans_without_a_compaction_look_at_no_request(rule, monkeypatch):
    """As without compression: what a plan costs does not grow with the rows that decode. Blocks
    are appended where a cache ends, which has lost any number of tokens."""
    looked: list[int] = []
    schedule = RowPlanner._schedule

    def watched(planner, requests, builder):
        looked.append(len(requests))
        schedule(planner, requests, builder)

    monkeypatch.setattr(RowPlanner, "_schedule", watched)
    scheduler = make_scheduler(kv_compression=rule)
    requests = [make_request(100 + 7 * n, max_tokens=60) for n in range(5)]
    add(scheduler, *requests)
    for _ in range(3):
        run(scheduler, scheduler.schedule())
    looked.clear()
    for _ in range(50):
        run(scheduler, scheduler.schedule())
        scheduler.check_invariants()
    assert looked == [0] * 50
    assert scheduler.stats.kv_compactions == (5 if rule.ratio < 1 and not rule.on_pressure else 0)
    drain(scheduler)
    assert all(len(request.output_token_ids) == 60 for request in requests)
