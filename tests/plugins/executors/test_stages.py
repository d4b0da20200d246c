"""Stages in processes of their own: the same tokens as with one rank, and none without the
others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_rank_failures import DECODE, kill, lose
from test_ranks import (
    LONG,
    OFFLOAD,
    Running,
    checkpoint,
    config,
    forked_ranks,
    mixed,
    outputs,
    restored,
)

from jackfield import AsyncEngine
from jackfield.core.step import StepPlan

from helpers import at_once, make_checkpoint

_ = checkpoint, forked_ranks  # The fixtures, which are found by their names.


@pytest.fixture(scope="module")
def one(checkpoint: Path) -> Iterator[Running]:
    running = Running(config(checkpoint))
    yield running
    running.close()


@pytest.fixture(scope="module")
def two(checkpoint: Path) -> Iterator[Running]:
    made = config(checkpoint, pipeline_parallel_size=2, kv_transfer_config=OFFLOAD)
    running = Running(made)
    yield running
    running.close()


def test_tokens_are_those_of_one_rank(one: Running, two: Running) -> None:
    """With a grammar, chunks, several completions, and too few blocks for all of them."""
    expected, preempted = one.run(mixed(one.engine)), one.engine.stats().num_preemptions
    assert preempted, "the requests of this test need more blocks than there are"
    assert two.run(mixed(two.engine)) == expected
    assert two.engine.stats().num_preemptions


def test_a_prefix_hit_gives_the_same_tokens(one: Running, two: Running) -> None:
    async def twice(engine: AsyncEngine) -> tuple[list[object], int]:
        await engine.reset_prefix_cache()
        first = await outputs(engine, LONG)
        before = engine.stats().prefix_cache_hits
        assert await outputs(engine, LONG) == first
        return first, engine.stats().prefix_cache_hits - before

    expected = one.run(twice(one.engine))
    assert expected[1] and two.run(twice(two.engine)) == expected


def test_blocks_come_back_from_host_memory_on_all_stages(one: Running, two: Running) -> None:
    found, loaded = two.run(restored(two.engine))
    assert loaded and found == one.run(outputs(one.engine, LONG))


def test_health_and_an_abort(one: Running, two: Running) -> None:
    async def aborted(engine: AsyncEngine) -> list[object]:
        await engine.check_health()
        other = asyncio.create_task(outputs(engine, LONG[3:20]))
        ended = asyncio.create_task(outputs(engine, LONG[:30], max_tokens=60))
        await asyncio.sleep(0.05)
        ended.cancel()
        return [await other, await outputs(engine, LONG[2:40])]

    assert two.run(aborted(two.engine)) == one.run(aborted(one.engine))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"kv_compression_ratio": 0.5}, {"kv_compression_levels": "8@8,4:0.4@24"}], ids=str
)
def test_kv_compression_drops_the_same_tokens(checkpoint: Path, options: dict[str, Any]) -> None:
    """Each stage chooses for its own layers, by the plan's numbers, and rounds them."""

    async def serve(stages: int) -> tuple[list[object], int]:
        made = config(
            checkpoint, pipeline_parallel_size=stages, kv_compression="key_norm",
            skip_tokenizer_init=True, **options,
        )  # fmt: skip
        async with AsyncEngine(made) as engine:
            answers = await at_once(engine, *(outputs(engine, LONG[at:50]) for at in range(3)))
            return list(answers), engine.stats().kv_compactions

    expected = asyncio.run(serve(1))
    assert expected[1] and asyncio.run(serve(2)) == expected


def test_a_stage_that_is_killed_ends_the_engine(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    options = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    reason = asyncio.run(lose(folder, kill, DECODE, **options))
    assert "rank 1 of 2 (stage 0 of 2) was ended by SIGKILL" in reason


@pytest.mark.slow
def test_a_step_that_fails_ends_the_engine(checkpoint: Path) -> None:
    """With its cause. The first stage raises, and the last one waits for its states."""

    async def fail() -> str:
        engine = AsyncEngine(config(checkpoint, pipeline_parallel_size=2))
        await engine.start()
        executor: Any = engine.core.executor  # type: ignore[attr-defined]
        submit = executor.submit

        def broken(plan: StepPlan, in_process: Any) -> Any:
            wrong = (10_000,) * len(plan.slots)
            return submit(msgspec.structs.replace(plan, slots=wrong), in_process)

        executor.submit = broken
        [(_, reason)] = await outputs(engine, LONG[:7])
        assert reason == "error"
        await engine.stop()
        return engine.dead_reason or ""

    reason = asyncio.run(fail())
    assert "rank 1: IndexError" in reason and "not so on rank 0" in reason


@pytest.mark.slow
def test_stages_of_two_ranks_serve_the_tokens_of_one(one: Running, checkpoint: Path) -> None:
    four = Running(config(checkpoint, pipeline_parallel_size=2, tensor_parallel_size=2))
    try:
        assert four.run(mixed(four.engine)) == one.run(mixed(one.engine))
    finally:
        four.close()
