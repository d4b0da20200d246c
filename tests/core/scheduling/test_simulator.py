"""The simulator serves its traffic to the end and its figures are those of the traffic."""

from __future__ import annotations

import json
from pathlib import Path

from scheduling_simulator import (
    Arrival,
    ByArrival,
    StepTime,
    main,
    recorded_traffic,
    simulate,
    synthetic_traffic,
)

from jackfield.core.cache.groups import ONE_GROUP, CacheGroup
from jackfield.core.cache.reach import Reach
from jackfield.core.scheduling.scheduler import Scheduler


def make_scheduler(
    num_blocks: int, max_num_seqs: int = 64, groups: tuple[CacheGroup, ...] = ONE_GROUP
) -> Scheduler:
    return Scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        max_model_len=2048,
        num_blocks=num_blocks,
        block_size=16,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        policy=ByArrival(),
        groups=groups,
    )


def test_two_thousand_requests_are_all_served_in_a_tight_cache():
    traffic = synthetic_traffic(2000, rate=100, prompt_len=100, output_len=32)
    scheduler = make_scheduler(num_blocks=200)
    report = simulate(traffic, scheduler)
    scheduler.check_invariants()
    assert report.requests == 2000
    assert not scheduler.requests.by_id
    assert scheduler.stats.generation_tokens == sum(min(a.output_len, 2047) for a in traffic)
    assert report.preemptions > 0
    assert 0 < report.kv_use_mean <= report.kv_use_peak <= 1
    assert 0 < report.budget_use <= 1
    assert 0 <= report.queueing_p50 <= report.queueing_p99


def test_windows_serve_the_same_traffic_from_fewer_blocks():
    """As many bytes for both: a block of one group has all layers, one of six a sixth of them."""
    traffic = synthetic_traffic(300, rate=100, prompt_len=700, output_len=64)
    windows = (CacheGroup(), *(CacheGroup(reach=Reach(64)) for _ in range(5)))
    whole = make_scheduler(num_blocks=400)
    grouped = make_scheduler(num_blocks=6 * 400, groups=windows)
    before, after = (simulate(traffic, scheduler) for scheduler in (whole, grouped))
    grouped.check_invariants()
    assert not grouped.requests.by_id and not whole.requests.by_id
    assert grouped.stats.generation_tokens == whole.stats.generation_tokens
    assert grouped.kv.usage == 0.0
    assert after.preemptions < before.preemptions
    assert after.queueing_p99 < before.queueing_p99


def test_virtual_time_is_the_sum_of_the_steps():
    # One prefill of 10 tokens, then 4 decodes; the second request waits for the only slot.
    scheduler = make_scheduler(num_blocks=100, max_num_seqs=1)
    report = simulate(
        [Arrival(0.0, 10, 5), Arrival(0.0, 10, 5)], scheduler, StepTime(1.0, 0.1), max_in_flight=1
    )
    one_request = (1 + 10 * 0.1) + 4 * (1 + 0.1)
    assert abs(report.virtual_seconds - 2 * one_request) < 1e-9
    assert abs(report.queueing_p99 - one_request) < 1e-9
    assert report.steps == 10


def test_recorded_traffic_from_the_command_line(tmp_path: Path, capsys):
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival": i / 10, "prompt_len": 20 + i, "output_len": 3} for i in range(5)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert recorded_traffic(trace)[4] == Arrival(0.4, 24, 3)
    main(["--trace", str(trace)])
    figures = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert figures["requests"] == "5" and figures["steps"] == "15"
