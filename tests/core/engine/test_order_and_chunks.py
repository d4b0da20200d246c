"""Who goes first, and prompts in pieces or whole, through the whole engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, InvalidRequest
from jackfield.core.hooks import hookimpl
from jackfield.core.registry import Provenance, load_plugins
from jackfield.core.scheduling.pacing.step_sizes import StepSize, StepSizes

from helpers import at_once, make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def config(checkpoint: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": str(checkpoint),
            "device": "cpu",
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "attention_backend": "torch",
            "max_model_len": 128,
            "max_num_seqs": 1,
            **options,
        }
    )


async def finish(engine: AsyncEngine, name: str, order: list[str], **options: Any) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    async for out in engine.generate([5, 6, 7], params, request_id=name, **options):
        last = out
    order.append(name)
    return list(last.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("priority", ["first", "urgent", "soon", "late"]),
        ("fcfs", ["first", "late", "soon", "urgent"]),
    ],
)
async def test_priorities_order_those_that_wait(
    checkpoint: Path, policy: str, expected: list[str]
) -> None:
    order: list[str] = []
    async with AsyncEngine(config(checkpoint, scheduling_policy=policy)) as engine:
        tasks = [asyncio.create_task(finish(engine, "first", order, priority=0))]
        while not engine.stats().num_requests_running:
            await asyncio.sleep(0)
        for name, priority in (("late", 9), ("soon", 5), ("urgent", 1)):
            tasks.append(asyncio.create_task(finish(engine, name, order, priority=priority)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
    assert order == expected


class StepRows:
    """Counts each step's rows and tokens."""

    jackfield_api = 3

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []

    @hookimpl
    def step_finished(self, plan: Any) -> None:
        self.rows.append(plan.num_tokens)


@pytest.mark.parametrize("chunked", [True, False])
async def test_prompts_in_pieces_or_whole(checkpoint: Path, chunked: bool) -> None:
    """Three prompts of 60 tokens under a budget of 130."""
    plugins = load_plugins()
    seen = StepRows()
    plugins.add_plugin(seen, Provenance("tests", "0", "rows"))
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 130, "max_model_len": 100}
    engine_config = config(checkpoint, enable_chunked_prefill=chunked, **options)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)

    async def run_one(engine: AsyncEngine, number: int) -> list[int]:
        async for out in engine.generate([number] * 60, params):
            last = out
        return list(last.outputs[0].token_ids)

    async with AsyncEngine(engine_config, plugins=plugins) as engine:
        together = await at_once(engine, *(run_one(engine, n) for n in (3, 4, 5)))
        alone = [await run_one(engine, n) for n in (3, 4, 5)]
    assert together == alone
    prompts = [size for step in seen.rows for size in step if size > 1]
    assert all(sum(step) <= 130 for step in seen.rows)
    # Prompts asked again alone are in the cache but for their last, partial block.
    whole = [size for size in prompts if size == 60]
    assert len(whole) == (2 if chunked else 3)


async def test_decode_rows_that_waited_for_prompts_choose_the_same_tokens(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts of 60 tokens in steps of 25 tokens alone, while the first request decodes."""
    plugins = load_plugins()
    seen = StepRows()
    plugins.add_plugin(seen, Provenance("tests", "0", "rows"))
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)

    async def run_one(engine: AsyncEngine, number: int) -> list[int]:
        prompt = [number] * (60 if number > 3 else 4)
        async for out in engine.generate(prompt, params):
            last = out
        return list(last.outputs[0].token_ids)

    async with AsyncEngine(config(checkpoint, max_num_seqs=4), plugins=plugins) as engine:
        alone = [await run_one(engine, n) for n in (3, 4, 5, 6)]
        seen.rows.clear()
        monkeypatch.setattr(
            StepSizes, "next_size", lambda *_: StepSize(25, prompts_alone=True, longest_whole=0)
        )
        assert await engine.reset_prefix_cache()
        together = await at_once(engine, *(run_one(engine, n) for n in (3, 4, 5, 6)))
    assert together == alone
    assert not any(step[0] == 1 and max(step) > 1 for step in seen.rows), "decode rows are first"
    # Some are computed while the first decodes.
    assert sum(max(step) > 1 for step in seen.rows[1:]) >= 7


async def test_a_budget_below_the_context_needs_chunks(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="enable_chunked_prefill is off"):
        config(checkpoint, enable_chunked_prefill=False, max_num_batched_tokens=64)
    roomy = config(checkpoint, enable_chunked_prefill=False, max_model_len=64)
    async with AsyncEngine(roomy) as engine:
        with pytest.raises(InvalidRequest, match="64"):
            async for _ in engine.generate([3] * 65, SamplingParams(max_tokens=1)):
                pass
        assert len(await finish(engine, "next", [])) == 6


async def test_a_prompt_beyond_the_budget_is_refused_with_the_options_name(
    checkpoint: Path,
) -> None:
    """The context would hold it, a step without chunks does not."""
    narrow = config(
        checkpoint, enable_chunked_prefill=False, max_num_batched_tokens=64, max_model_len=None
    )
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    async with AsyncEngine(narrow) as engine:
        with pytest.raises(InvalidRequest, match=r"65 tokens.*64 \(max_num_batched_tokens\)") as e:
            await anext(engine.generate([3] * 65, params))
        assert e.value.param == "prompt"
        assert (engine.stats().kv_blocks_used, engine.stats().num_requests_waiting) == (0, 0)
        last = [out async for out in engine.generate([3] * 64, params)][-1]
        assert len(last.outputs[0].token_ids) == 2


async def test_an_urgent_request_takes_the_blocks_of_a_running_one(checkpoint: Path) -> None:
    """It ends first though it came last, and the one it displaced says what it says alone."""

    def params(count: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)

    async def tokens(engine: AsyncEngine, name: str, count: int, priority: int) -> list[int]:
        prompt = [len(name)] * 30
        async for out in engine.generate(prompt, params(count), request_id=name, priority=priority):
            last = out
        order.append(name)
        return list(last.outputs[0].token_ids)

    order: list[str] = []
    engine_config = config(
        checkpoint, scheduling_policy="priority", max_num_seqs=4, block_size=4,
        num_gpu_blocks_override=26, enable_prefix_caching=False,
    )  # fmt: skip
    async with AsyncEngine(engine_config) as engine:
        alone = await tokens(engine, "patient", 60, 9)
        order.clear()
        patient = asyncio.create_task(tokens(engine, "patient", 60, 9))
        while not engine.stats().num_requests_running:
            await asyncio.sleep(0)
        urgent = asyncio.create_task(tokens(engine, "urgent", 40, 0))
        assert await patient == alone
        assert len(await urgent) == 40
        assert order == ["urgent", "patient"]
        assert engine.stats().num_preemptions > 0
