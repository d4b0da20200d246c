"""A step that raises ends its own requests; the engine goes on while the device does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.engine.step_loop import MAX_FAILED_STEPS
from jackfield.core.errors import EngineStopped, RankFailed
from jackfield.core.step import StepPlan, WorkerJob
from jackfield.core.worker.launched_step import LaunchedStep
from jackfield.core.worker.parts.kv_transfer import KVTransfer
from jackfield.core.worker.runner import ModelRunner
from jackfield.plugins.kv_connectors.threads import Jobs

from helpers import make_checkpoint

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]
POISON = 13 * [44]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def engine_of(checkpoint: Path, **options: Any) -> AsyncEngine:
    return AsyncEngine(
        EngineConfig(
            **{
                "model": str(checkpoint),
                "dtype": "float32",
                "skip_tokenizer_init": True,
                "max_model_len": 128,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 128,
                "num_gpu_blocks_override": 60,
                "block_size": 4,
                "attention_backend": "torch",
                **options,
            }
        )
    )


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


async def final(stream: Any) -> Any:
    outputs = [output async for output in stream]
    return outputs[-1] if outputs else None


class Failures:
    """Makes a runner's steps raise, in their middle, where `chosen` says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chosen: Any = lambda plan: False
        self.count = 0
        launch = ModelRunner.launch

        def failing(runner: ModelRunner, plan: StepPlan, *beside: Any) -> Any:
            if plan.slots and self.chosen(plan):
                self.count += 1
                runner.update_slots(plan, *beside)  # Half of it has happened.
                raise RuntimeError("no luck")
            return launch(runner, plan, *beside)

        monkeypatch.setattr(ModelRunner, "launch", failing)


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Failures:
    return Failures(monkeypatch)


def has_poison(plan: StepPlan) -> bool:
    return any(44 in start.token_ids for start in plan.starts)


async def test_a_failed_step_ends_its_requests_and_others_get_their_tokens(
    checkpoint: Path, failures: Failures
) -> None:
    async with engine_of(checkpoint) as engine:
        alone = (await final(engine.generate(PROMPT, greedy(20)))).outputs[0].token_ids
        failures.chosen = has_poison
        # Two slots each: those that wait have no part in the step.
        outputs = await asyncio.gather(
            final(engine.generate(PROMPT, greedy(20))),
            final(engine.generate(POISON, greedy(20))),
            *(final(engine.generate(PROMPT, greedy(20))) for _ in range(6)),
        )
        complete = [output for output in outputs if output.error is not None]
        assert failures.count == 1 and 0 < len(complete) < len(outputs)
        assert outputs[1] in complete
        for output in complete:
            assert output.outputs[0].finish_reason == "error"
            assert "RuntimeError: no luck" in output.error
        for output in outputs:
            if output not in complete:
                assert output.outputs[0].token_ids == alone
        assert engine.healthy
        await engine.check_health()
        assert (await final(engine.generate(PROMPT, greedy(20)))).outputs[0].token_ids == alone
        assert engine.stats().kv_blocks_used == 0
        engine.core.scheduler.check_invariants()


async def test_prefix_blocks_of_a_failed_step_are_not_hit(
    checkpoint: Path, failures: Failures
) -> None:
    async with engine_of(checkpoint) as engine:
        right = (await final(engine.generate(PROMPT, greedy(8)))).outputs[0].token_ids
        assert await engine.reset_prefix_cache()
        failures.chosen = lambda plan: failures.count == 0
        assert (await final(engine.generate(PROMPT, greedy(8)))).error is not None
        output = await final(engine.generate(PROMPT, greedy(8)))
        assert output.num_cached_tokens == 0
        assert output.outputs[0].token_ids == right


async def test_streams_that_had_begun_end_with_an_error_and_keep_what_they_had(
    checkpoint: Path, failures: Failures
) -> None:
    async with engine_of(checkpoint) as engine:
        stream = engine.generate(PROMPT, greedy(60))
        first = await anext(stream)
        failures.chosen = lambda plan: failures.count == 0
        last = await final(stream)
        assert last.outputs[0].finish_reason == "error"
        assert len(last.outputs[0].token_ids) >= len(first.outputs[0].token_ids)
        assert engine.healthy


async def test_steps_that_fail_one_after_another_end_the_engine(
    checkpoint: Path, failures: Failures
) -> None:
    async with engine_of(checkpoint) as engine:
        failures.chosen = lambda plan: True
        for _ in range(MAX_FAILED_STEPS):
            assert (await final(engine.generate(PROMPT, greedy(8)))).error is not None
        assert failures.count == MAX_FAILED_STEPS
        assert "no luck" in str(engine.dead_reason)
        with pytest.raises(EngineStopped, match="no luck"):
            await final(engine.generate(PROMPT, greedy(8)))
        assert engine.stats().kv_blocks_used == 0


async def test_steps_that_fail_now_and_then_do_not_end_the_engine(
    checkpoint: Path, failures: Failures
) -> None:
    async with engine_of(checkpoint) as engine:
        failures.chosen = has_poison
        for _ in range(MAX_FAILED_STEPS + 2):
            assert (await final(engine.generate(POISON, greedy(8)))).error is not None
            assert (await final(engine.generate(PROMPT, greedy(8)))).error is None
        assert failures.count == MAX_FAILED_STEPS + 2 and engine.healthy


async def test_a_lost_device_ends_the_engine_at_once(checkpoint: Path, failures: Failures) -> None:
    async with engine_of(checkpoint) as engine:

        async def lost(job: WorkerJob) -> None:
            raise RuntimeError("an illegal memory access")

        engine.core.executor.ask = lost  # type: ignore[method-assign,assignment]
        failures.chosen = lambda plan: True
        running = asyncio.gather(*(final(engine.generate(PROMPT, greedy(8))) for _ in range(6)))
        outputs = await running
        assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
        assert failures.count == 1 and not engine.healthy
        assert "no luck" in str(engine.dead_reason)


async def test_the_failure_of_a_rank_is_the_reason_not_what_a_step_saw_of_it(
    checkpoint: Path, failures: Failures
) -> None:
    """The step fails on all ranks, and one of them ends before it could recover."""
    async with engine_of(checkpoint) as engine:

        async def ended(job: WorkerJob) -> None:
            error = RankFailed("rank 1 of 2 ended with status 1")
            engine.core._executor_failed(error)  # type: ignore[attr-defined]
            raise error

        engine.core.executor.ask = ended  # type: ignore[method-assign,assignment,attr-defined]
        failures.chosen = lambda plan: True
        assert (await final(engine.generate(PROMPT, greedy(8)))).error is not None
        assert engine.dead_reason == "RankFailed: rank 1 of 2 ended with status 1"


async def test_an_executor_that_cannot_recover_ends_with_its_first_failed_step(
    checkpoint: Path, failures: Failures
) -> None:
    async with engine_of(checkpoint) as engine:

        def refuse(job: WorkerJob) -> Any:
            raise NotImplementedError

        engine.core.executor.ask = refuse  # type: ignore[method-assign]
        await engine.check_health()
        failures.chosen = lambda plan: True
        assert (await final(engine.generate(PROMPT, greedy(8)))).error is not None
        assert not engine.healthy


async def test_a_plan_that_is_not_taken_counts_as_a_failed_step(checkpoint: Path) -> None:
    async with engine_of(checkpoint) as engine:
        submit, calls = engine.core.executor.submit, 0

        def refuse(plan: StepPlan, in_process: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise TypeError("on purpose")
            return submit(plan, in_process)

        engine.core.executor.submit = refuse  # type: ignore[method-assign]
        assert "on purpose" in (await final(engine.generate(PROMPT, greedy(8)))).error
        assert (await final(engine.generate(PROMPT, greedy(8)))).error is None


# ---------------------------------------------------------------- with a KV connector


OFFLOAD = {"kv_transfer_config": {"kv_connector": "cpu_offload"}}


async def settled(engine: AsyncEngine) -> None:
    """No transfer holds a block any more."""
    async with asyncio.timeout(300):
        while engine.stats().kv_blocks_used:
            await asyncio.sleep(0.001)
    engine.core.scheduler.check_invariants()


def prompts_of(count: int) -> list[list[int]]:
    return [[5 + (i * step) % 37 for i in range(18)] for step in range(1, count + 1)]


def has_transfers(plan: StepPlan) -> bool:
    return "kv_transfer" in plan.parts


def has_loads(plan: StepPlan) -> bool:
    if not has_transfers(plan):
        return False
    return bool(msgspec.msgpack.decode(plan.parts["kv_transfer"].metadata, type=Jobs).loads)


@pytest.mark.parametrize(
    "selection", [has_poison, pytest.param(has_transfers, marks=pytest.mark.slow), has_loads]
)
async def test_transfers_of_failed_steps_and_of_those_not_run_come_to_their_end(
    checkpoint: Path, failures: Failures, selection: Any
) -> None:
    prompts = prompts_of(5)
    async with engine_of(checkpoint) as engine:
        alone = [(await final(engine.generate(p, greedy(9)))).outputs[0].token_ids for p in prompts]
    async with engine_of(checkpoint, **OFFLOAD) as engine:
        loads = 0
        for _ in range(2 * MAX_FAILED_STEPS):
            # One failure a round: the step after it must do well.
            before = failures.count
            failures.chosen = lambda plan, before=before: (
                failures.count == before and selection(plan)
            )
            # Rows beside the loads, from a prompt too short to be loaded.
            beside = engine.generate(PROMPT[:3], greedy(60))
            await anext(beside)
            outputs = await asyncio.gather(
                *(final(engine.generate(prompt, greedy(9))) for prompt in prompts),
                final(engine.generate(POISON, greedy(9))),
                final(beside),
            )
            for output, tokens in zip(outputs, alone, strict=False):
                assert output.error is not None or output.outputs[0].token_ids == tokens
            failures.chosen = lambda plan: False
            again = await asyncio.gather(
                *(final(engine.generate(prompt, greedy(9))) for prompt in prompts)
            )
            assert [output.outputs[0].token_ids for output in again] == alone
            await settled(engine)
            assert await engine.reset_prefix_cache()
            loads = engine.stats().external_prefix_cache_hits
        assert failures.count > 0 and loads > 0 and engine.healthy


async def test_a_report_that_a_failed_step_was_to_bring_comes_with_the_next(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step fails on the device, after the report was taken in."""
    broken: list[int] = []
    wait = LaunchedStep.wait

    def failing(step: LaunchedStep) -> Any:
        if (
            step.plan.slots
            and engine.core.executor._worker.part(KVTransfer).half._reports.qsize()
            and not broken
        ):
            broken.append(step.plan.step)
            raise RuntimeError("no luck")
        return wait(step)

    monkeypatch.setattr(LaunchedStep, "wait", failing)
    async with engine_of(checkpoint, **OFFLOAD) as engine:
        for prompt in 20 * prompts_of(3):
            await final(engine.generate(prompt, greedy(40)))
            await settled(engine)
            assert await engine.reset_prefix_cache()
            if broken:
                break
        assert broken and engine.healthy
        assert (await final(engine.generate(PROMPT, greedy(8)))).error is None
        await settled(engine)


async def test_transfers_of_a_plan_that_is_not_taken_go_with_the_next(checkpoint: Path) -> None:
    async with engine_of(checkpoint, **OFFLOAD) as engine:
        submit, refused = engine.core.executor.submit, 0

        def refuse(plan: StepPlan, in_process: Any) -> Any:
            nonlocal refused
            if has_transfers(plan) and refused < 2:
                refused += 1
                raise TypeError("on purpose")
            return submit(plan, in_process)

        alone = (await final(engine.generate(PROMPT, greedy(8)))).outputs[0].token_ids
        await settled(engine)
        assert await engine.reset_prefix_cache()
        engine.core.executor.submit = refuse  # type: ignore[method-assign]
        output = await final(engine.generate(PROMPT, greedy(8)))
        assert output.error is None and output.outputs[0].token_ids == alone
        assert refused == 2 and output.num_cached_tokens == 16
        await settled(engine)
        assert engine.healthy
