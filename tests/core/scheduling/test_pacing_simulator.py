"""First tokens under load, in virtual time: what was measured, and what the target brings."""

from __future__ import annotations

import functools

import pytest
from pacing_simulator import Report, Server, bursts, main, poisson, simulate

from jackfield.entrypoints.bench.report import percentile
from jackfield.entrypoints.bench.serve.load import arrivals

MEASURED = {33.7: (0.0232, 0.0503), 31.7: (0.0225, 0.0511)}
"""Requests per second → first tokens' p50 and p99, seconds: 8B on an H200, 400 requests twice
(docs/benchmarks/traffic.jsonl, 2026-11-27)."""


@functools.cache
def served(rate: float, target: float) -> Report:
    """Two draws, those of `bench serve --repeats 2`."""
    both = Report([], [], 0.0)
    for seed in (0, 1):
        times = arrivals(400, rate, seed=seed)
        one = simulate(poisson(times), Server(), ttft_target=target, seed=seed)
        both = Report(
            both.first_tokens + one.first_tokens, both.gaps + one.gaps, both.idle + one.idle
        )
    return both


@pytest.mark.parametrize("rate", MEASURED)
def test_the_simulation_says_what_was_measured(rate: float) -> None:
    report = served(rate, 0.05)
    assert len(report.first_tokens) == 800 and len(report.gaps) == 800 * 127
    median, slowest = MEASURED[rate]
    assert percentile(report.first_tokens, 50) == pytest.approx(median, rel=0.1)
    assert percentile(report.first_tokens, 99) == pytest.approx(slowest, rel=0.1)


def test_a_target_brings_the_slowest_first_tokens_and_costs_little() -> None:
    without, with_target = served(33.7, 0.0), served(33.7, 0.05)
    slowest = [percentile(report.first_tokens, 99) for report in (without, with_target)]
    assert slowest[1] < 0.85 * slowest[0]
    mean = [sum(report.gaps) / len(report.gaps) for report in (without, with_target)]
    assert mean[1] < 1.1 * mean[0]


def test_streams_beside_bursts_of_prompts_get_their_tokens_in_time() -> None:
    without, with_target = (
        simulate(bursts(), Server(), ttft_target=0.05, itl_target=target) for target in (0.0, 0.05)
    )
    gaps = [percentile(report.gaps, 99) for report in (without, with_target)]
    assert gaps[1] < 0.06 < 0.12 < gaps[0]
    firsts = [percentile(report.first_tokens, 99) for report in (without, with_target)]
    assert firsts[1] < 1.15 * firsts[0], "smaller steps cost prompts little"
    assert len(with_target.gaps) == len(without.gaps)


def test_late_plans_leave_the_device_hardly_idle() -> None:
    report = served(33.7, 0.05)
    assert 0 < report.idle < 0.01 * sum(report.gaps) / 30, "some 30 requests decode at once"


def test_the_command_prints_percentiles(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--draws", "1", "--requests", "40"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["first", "token", "p50"] and "p99" in second
