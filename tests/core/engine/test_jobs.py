"""What an engine asks of its executor beside steps, and how many steps it keeps in flight."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.engine import step_loop
from jackfield.core.errors import PluginError
from jackfield.core.hooks import hookimpl
from jackfield.core.registry import load_plugins
from jackfield.core.step import PrepareAhead
from jackfield.plugins.executors.inprocess import InProcessExecutor


class NotingExecutor(InProcessExecutor):
    """Has `left` things to prepare, and notes how many steps are in flight."""

    steps_in_flight = 2
    left = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.flying: set[Any] = set()
        self.most_flying = 0
        self.prepared: list[bool] = []
        """Replies to `PrepareAhead`."""

    async def start(self) -> Any:
        info = await super().start()
        return msgspec.structs.replace(info, steps_in_flight=self.steps_in_flight)

    def submit(self, *args: Any) -> Any:
        future = super().submit(*args)
        self.flying.add(future)
        future.add_done_callback(self.flying.discard)
        self.most_flying = max(self.most_flying, len(self.flying))
        return future

    def ask(self, job: Any) -> Any:
        if not isinstance(job, PrepareAhead):
            return super().ask(job)
        assert not self.flying, "asked while a step is in flight"
        self.left -= 1
        self.prepared.append(self.left > 0)
        future = asyncio.get_running_loop().create_future()
        future.set_result(self.left > 0)
        return future


def engine_of(**attributes: Any) -> AsyncEngine:
    class Plugin:
        jackfield_api = 3

        @hookimpl
        def register_executors(self, registry: Any) -> None:
            registry.add("noting", type("Noting", (NotingExecutor,), attributes))

    config = EngineConfig(
        device="cpu", dtype="float32", max_model_len=64, max_num_seqs=4, executor="noting"
    )
    return AsyncEngine(config, plugins=load_plugins(extra=[Plugin()]))


async def tokens_of(engine: AsyncEngine) -> list[int]:
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    async for output in engine.generate([70, 71, 72], params):
        last = output
    return list(last.outputs[0].token_ids)


async def until(condition: Any) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.001)


async def test_an_idle_engine_prepares_until_nothing_is_left_and_again_after_steps() -> None:
    async with engine_of(left=3) as engine:
        executor: Any = engine.core.executor
        await until(lambda: len(executor.prepared) >= 3)
        assert executor.prepared == [True, True, False]
        await tokens_of(engine)
        await until(lambda: len(executor.prepared) >= 4)
        assert executor.prepared[3:] == [False]


async def test_nothing_is_prepared_between_requests_that_follow_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_loop, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(step_loop, "QUIET_SECONDS", 3600.0)
    async with engine_of(left=10**9) as engine:
        executor: Any = engine.core.executor
        await until(lambda: executor.prepared)
        await tokens_of(engine)
        before = len(executor.prepared)
        await asyncio.sleep(0.1)
        await tokens_of(engine)
        assert len(executor.prepared) == before


async def test_preparing_that_fails_is_given_up_and_serving_goes_on() -> None:
    jobs = []

    def record_job(self: Any, job: Any) -> Any:
        jobs.append(job)
        raise RuntimeError("no memory for graphs")

    async with engine_of(ask=record_job) as engine:
        await until(lambda: jobs)
        first = await tokens_of(engine)
        assert first == await tokens_of(engine) and len(jobs) == 1


@pytest.mark.parametrize("depth", [1, 3])
async def test_the_executor_says_how_many_steps_are_in_flight(depth: int) -> None:
    async with engine_of() as engine:
        expected = await tokens_of(engine)
    async with engine_of(steps_in_flight=depth) as engine:
        assert await tokens_of(engine) == expected
        executor: Any = engine.core.executor
        assert executor.most_flying == depth


async def test_an_executor_that_takes_no_step_at_all_is_refused() -> None:
    with pytest.raises(PluginError, match="steps_in_flight must be at least 1"):
        async with engine_of(steps_in_flight=0):
            pass
