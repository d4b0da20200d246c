"""The line about what the engine does: rates since the last one, and none while idle."""

from __future__ import annotations

import asyncio
import logging

import pytest

from jackfield.core.metrics.stats_log import DraftLog, StatsLog, logging_stats
from jackfield.core.outputs import EngineStats


def test_a_line_has_the_rates_since_the_last_one() -> None:
    log = StatsLog(EngineStats(prompt_tokens=500, generation_tokens=70), 100.0)
    busy = EngineStats(
        prompt_tokens=1500, generation_tokens=570, num_requests_running=3, num_requests_waiting=2,
        kv_cache_usage=0.25, prefix_cache_queries=1000, prefix_cache_hits=400, steps=9,
    )  # fmt: skip
    assert log.line(busy, 110.0) == (
        "Prompt throughput: 100.0 tokens/s, generation throughput: 50.0 tokens/s, "
        "running: 3 reqs, waiting: 2 reqs, KV cache usage: 25.0%, prefix cache hit rate: 40.0%"
    )
    # Requests that run are reported though no step has ended meanwhile.
    line = log.line(busy, 120.0)
    assert line is not None and "generation throughput: 0.0 tokens/s" in line
    assert line.endswith("prefix cache hit rate: -")


def test_nothing_is_said_while_nothing_runs() -> None:
    log = StatsLog(EngineStats(), 0.0)
    assert log.line(EngineStats(), 10.0) is None
    ended = EngineStats(prompt_tokens=5, generation_tokens=8, steps=8)
    assert log.line(ended, 20.0) is not None  # It ran and ended in between.
    assert log.line(ended, 30.0) is None


def test_counts_of_an_engine_that_was_started_again_are_not_negative() -> None:
    log = StatsLog(EngineStats(prompt_tokens=900, generation_tokens=900, steps=50), 0.0)
    line = log.line(EngineStats(prompt_tokens=90, num_requests_running=1), 10.0)
    assert line is not None and "-" not in line.removesuffix("rate: -")


def test_a_line_of_drafts_has_vllms_words() -> None:
    """And is about the drafts since the last one; without any, there is none."""

    def stats(rows: int, drafted: int, *accepted: int) -> EngineStats:
        return EngineStats(
            spec_decode_num_drafts=rows, spec_decode_num_draft_tokens=drafted,
            spec_decode_num_accepted_tokens=sum(accepted),
            spec_decode_num_accepted_tokens_per_pos=dict(enumerate(accepted)),
        )  # fmt: skip

    log = DraftLog(stats(100, 300, 50, 20, 10), 0.0)
    assert log.line(stats(200, 500, 130, 70, 30), 60.0) == (
        "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 2.50 tokens/s, "
        "Drafted throughput: 3.33 tokens/s, Accepted: 150 tokens, Drafted: 200 tokens, "
        "Per-position acceptance rate: 0.800, 0.500, 0.200, Avg Draft acceptance rate: 75.0%"
    )
    assert log.line(stats(200, 500, 130, 70, 30), 120.0) is None
    assert log.line(stats(1, 2, 1, 0, 0), 180.0) is None, "it was started again"


@pytest.mark.parametrize("enabled", [True, False])
async def test_lines_come_at_intervals_unless_they_are_turned_off(
    caplog: pytest.LogCaptureFixture, enabled: bool
) -> None:
    caplog.set_level(logging.INFO if enabled else logging.ERROR, "jackfield.stats")
    reads, enough = 0, asyncio.Event()

    def read() -> EngineStats:
        nonlocal reads
        reads += 1
        if reads == 8:
            enough.set()
        return EngineStats(
            num_requests_running=1, spec_decode_num_drafts=reads, spec_decode_num_draft_tokens=reads
        )

    async with logging_stats(read, 0.001):
        if enabled:
            await enough.wait()
        else:
            await asyncio.sleep(0)
    assert "jackfield-stats" not in {task.get_name() for task in asyncio.all_tasks()}
    lines = [record for record in caplog.records if record.name == "jackfield.stats"]
    assert len(lines) >= 2 if enabled else not (lines or reads)
    drafts = [line for line in lines if line.getMessage().startswith("SpecDecoding")]
    assert len(drafts) == (len(lines) // 7 if enabled else 0)
