"""`ExecutorKit`: whether an executor runs plans in order, reports failures, and cleans up.

    class TestMine(ExecutorKit):
        name = "mine"                                # as registered: `--executor mine`

On the embedded model, on the CPU or what `device` says. Plans are made by the real scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from ...core.config import Device, EngineConfig
from ...core.engine.async_engine import AsyncEngine
from ...core.engine.resolve_config import resolve_config, resolve_runner
from ...core.loading.model_config import resolve_model_config
from ...core.protocols.executors import Executor, ExecutorInfo
from ...core.request import Request
from ...core.sampling_params import OutputKind, SamplingParams
from ...core.scheduling.scheduler import Scheduler
from ...core.step import (
    NOTHING_IN_PROCESS,
    BalanceExperts,
    Ping,
    PrepareAhead,
    Recover,
    StepPlan,
    StepResult,
    WorkerJob,
)
from ..policies.builtin import FirstComeFirstServed
from .kit import Kit

STUCK_SECONDS = 60.0
"""Longer than any operation here takes; what takes longer hangs."""
MAX_TOKENS = 6
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "block_size": 4, "max_model_len": 96, "num_gpu_blocks_override": 40,
    "max_num_seqs": 4, "max_num_batched_tokens": 32,
}  # fmt: skip

MIXTURE: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 96,
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 96,
}  # fmt: skip
"""A configuration with experts."""


def prompts() -> list[list[int]]:
    """Return prompts of assorted lengths."""
    draw = random.Random(3)
    return [[draw.randrange(10, 1000) for _ in range(length)] for length in (1, 9, 40, 17)]


class ExecutorKit(Kit):
    """Subclass it, and set the class variables."""

    kind = "executor"
    device: ClassVar[Device] = "cpu"

    # -------------------------------------------------------------- what tests are made of

    def config(self, **options: Any) -> EngineConfig:
        settings = {**OPTIONS, "device": self.device, "executor": self.name, **options}
        return EngineConfig(**settings)

    def make(self, **options: Any) -> tuple[Executor, EngineConfig]:
        """Create the executor as an engine does; return it and the resolved configuration."""
        engine_config = self.config(**options)
        plugins = self.plugins()
        config = resolve_config(engine_config, plugins)
        model_config = resolve_model_config(config)
        config, model_config = resolve_runner(engine_config, config, model_config, plugins)
        executor: Executor = self.registered()(config, model_config, plugins)
        return executor, config

    def run(self, scenario: Coroutine[Any, Any, Any]) -> Any:
        """Run a scenario to its end, with a time limit; check that none of its threads is left."""
        before = set(threading.enumerate())
        result = asyncio.run(asyncio.wait_for(scenario, STUCK_SECONDS))
        remaining = [thread.name for thread in threading.enumerate() if thread not in before]
        remaining = [name for name in remaining if not name.startswith("asyncio_")]
        assert not remaining, f"threads are left: {', '.join(remaining)}"
        return result

    def scheduler(self, config: EngineConfig, info: ExecutorInfo) -> Scheduler:
        assert config.max_num_batched_tokens is not None
        return Scheduler(
            max_num_seqs=config.max_num_seqs, max_model_len=96,
            max_num_batched_tokens=config.max_num_batched_tokens, num_blocks=info.num_blocks,
            block_size=config.block_size, enable_prefix_caching=True, enable_chunked_prefill=True,
            policy=FirstComeFirstServed(),
        )  # fmt: skip

    def request(self, number: int) -> Request:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        return Request(
            request_id=f"request-{number}", prompt_token_ids=prompts()[number], params=params,
            max_tokens=MAX_TOKENS, seed=0, arrival=float(number),
        )  # fmt: skip

    async def drive(self, executor: Executor, scheduler: Scheduler, ahead: int = 2) -> None:
        """Run the scheduled steps, with this many plans in flight; results come in order."""
        flying: list[tuple[StepPlan, asyncio.Future[StepResult]]] = []
        while True:
            while len(flying) < ahead and (plan := scheduler.schedule()) is not None:
                flying.append((plan, executor.submit(plan, scheduler.in_process(plan))))
            if not flying:
                return
            plan, future = flying.pop(0)
            result = await asyncio.shield(future)
            assert result.step == plan.step, "the result of another step"
            assert not result.failed
            assert len(result.counts) == len(plan.slots)
            assert sum(result.counts) == len(result.token_ids)
            for count, sampled in zip(result.counts, plan.samples, strict=True):
                assert (count > 0) == sampled, "0 where a row does not sample, and only there"
            assert all(token >= 0 for token in result.token_ids)
            scheduler.update(plan, result)

    async def does(self, executor: Executor, job: WorkerJob) -> bool:
        """Return whether the executor did this job; False: it does not do it at all."""
        try:
            await executor.ask(job)
        except NotImplementedError:
            return False
        return True

    def broken(self, plan: StepPlan) -> StepPlan:
        """Return a plan with a row in a slot that does not exist."""
        return StepPlan(step=plan.step, slots=(10_000,), num_tokens=(1,), samples=(True,))

    # -------------------------------------------------------------- what it does

    def test_what_it_tells_of_itself(self) -> None:
        async def scenario() -> None:
            executor, _ = self.make()
            info = await executor.start()
            await executor.stop()
            assert isinstance(info, ExecutorInfo)
            assert info.num_blocks == OPTIONS["num_gpu_blocks_override"], "the null block included"
            assert info.dtype == "float32"
            assert info.device.startswith(self.device)
            assert info.attention_backend in self.plugins()["attention_backend"]
            assert info.attention_reason.strip()
            assert info.weight_bytes > 1000
            assert info.kv_cache_bytes % info.num_blocks == 0 and info.kv_cache_bytes
            assert info.load_seconds >= 0

        self.run(scenario())

    def test_what_is_optional_is_called_as_an_engine_does(self) -> None:
        """What begins early may be begun twice, and an executor that is stopped has not failed."""

        async def scenario() -> None:
            plugins = self.plugins()
            config = resolve_config(self.config(), plugins)
            executor_class: type[Executor] = self.registered()
            assert isinstance(executor_class.tensor_parallel, bool)
            assert isinstance(executor_class.pipeline_parallel, bool)
            assert isinstance(executor_class.data_parallel, bool)
            assert isinstance(executor_class.moves_experts, bool)
            assert isinstance(executor_class.joins_engines, bool)
            assert isinstance(executor_class.joins_hosts, bool)
            if executor_class.joins_hosts:
                assert executor_class.run_host is not Executor.run_host
            for _ in range(2):
                executor_class.start_ahead(config)
            await asyncio.to_thread(executor_class.initialize_device, config, plugins)
            failures: list[Exception] = []
            executor, config = self.make()
            executor.watch_failure(failures.append)
            with contextlib.suppress(NotImplementedError):
                executor.watch_transfers(lambda: None)
            await executor.start()
            await executor.stop()
            assert not failures, "it said that it cannot go on"

        self.run(scenario())

    def test_tokens_are_those_of_the_executor_in_the_box(self) -> None:
        """Run four requests at once, as an engine does, and one after the other."""

        async def serve(executor: str) -> list[list[int]]:
            params = SamplingParams(
                temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True,
                output_kind=OutputKind.FINAL_ONLY,
            )  # fmt: skip

            async def generate(prompt: list[int]) -> list[int]:
                stream = engine.generate(prompt, params)
                return [output.outputs[0].token_ids async for output in stream][-1]

            config = self.config(executor=executor)
            async with AsyncEngine(config, plugins=self.plugins()) as engine:
                together = list(await asyncio.gather(*map(generate, prompts())))
                await engine.check_health()
                return together + [await generate(prompt) for prompt in prompts()]

        assert self.run(serve(self.name)) == self.run(serve("inprocess"))

    @pytest.mark.parametrize("ahead", [1, 2, 4])
    def test_plans_run_in_order(self, ahead: int) -> None:
        """Compare tokens for all numbers of plans in flight."""

        async def scenario(ahead: int) -> list[list[int]]:
            executor, config = self.make()
            scheduler = self.scheduler(config, await executor.start())
            requests = [self.request(number) for number in range(4)]
            for request in requests:
                scheduler.add_requests(request)
            await self.drive(executor, scheduler, ahead)
            await executor.stop()
            assert all(len(request.output_token_ids) == MAX_TOKENS for request in requests)
            return [request.output_token_ids for request in requests]

        assert self.run(scenario(ahead)) == self.run(scenario(1))

    def test_a_plan_may_have_no_rows(self) -> None:
        """What a plan changes in slots holds for the rows of later plans; a result comes back."""

        async def scenario(apart: bool) -> list[list[int]]:
            executor, config = self.make()
            scheduler = self.scheduler(config, await executor.start())
            requests = [self.request(number) for number in range(4)]
            for request in requests:
                scheduler.add_requests(request)
            while (plan := scheduler.schedule()) is not None:
                in_process = scheduler.in_process(plan)
                if apart:
                    empty = msgspec.structs.replace(plan, slots=(), num_tokens=(), samples=())
                    result = await executor.submit(empty, in_process)
                    assert (result.step, result.counts, result.token_ids) == (plan.step, [], [])
                    plan = StepPlan(plan.step, plan.slots, plan.num_tokens, plan.samples)
                    in_process = NOTHING_IN_PROCESS
                scheduler.update(plan, await executor.submit(plan, in_process))
            await executor.stop()
            return [request.output_token_ids for request in requests]

        assert self.run(scenario(True)) == self.run(scenario(False))

    def test_submitting_does_not_wait(self) -> None:
        """`submit` returns before the step is done, and `start` does not block the event loop."""

        async def scenario() -> None:
            executor, config = self.make()
            turns, over = 0, False

            async def count() -> None:
                nonlocal turns
                while not over:
                    turns += 1
                    await asyncio.sleep(0.001)  # 0 would take the interpreter from the start.

            counting = asyncio.create_task(count())
            info = await executor.start()
            over = True
            await counting
            # Of a loop that stands still, one before and one after.
            assert turns > 3, "the event loop stood still while it started"
            scheduler = self.scheduler(config, info)
            scheduler.add_requests(self.request(2))
            plan = scheduler.schedule()
            assert plan is not None
            future = executor.submit(plan, scheduler.in_process(plan))
            assert asyncio.isfuture(future)
            assert not future.done(), "submit ran the step itself"
            scheduler.update(plan, await future)
            await executor.stop()

        self.run(scenario())

    def test_a_step_that_fails_says_so_and_is_recovered_from(self) -> None:
        """The future of the step raises, and those of steps queued after it; after `Recover` there
        are new slots, and steps run."""

        async def scenario() -> None:
            executor, config = self.make()
            info = await executor.start()
            scheduler = self.scheduler(config, info)
            scheduler.add_requests(self.request(2))
            plans = [scheduler.schedule(), scheduler.schedule()]
            assert plans[0] is not None and plans[1] is not None
            first = executor.submit(plans[0], NOTHING_IN_PROCESS)
            failed = [
                executor.submit(plan, NOTHING_IN_PROCESS)
                for plan in (self.broken(plans[1]), plans[1])
            ]
            assert (await first).step == plans[0].step, "a step before the one that fails is done"
            for future in failed:
                with pytest.raises(Exception):  # noqa: B017 - whatever the worker raises
                    await future
            if await self.does(executor, Recover()):
                fresh, request = self.scheduler(config, info), self.request(1)
                fresh.add_requests(request)
                await self.drive(executor, fresh)
                assert len(request.output_token_ids) == MAX_TOKENS
            await executor.stop()

        self.run(scenario())

    def test_a_start_that_fails_says_why(self, tmp_path: Path) -> None:
        """The loader's own error is raised, and `stop` afterwards is harmless."""

        async def scenario() -> None:
            executor, _ = self.make(attention_backend="no-such-backend")
            with pytest.raises(Exception, match="no-such-backend"):
                await executor.start()
            await executor.stop()

        self.run(scenario())

    def test_a_ping_comes_after_what_was_queued(self) -> None:
        async def scenario() -> None:
            executor, config = self.make()
            scheduler = self.scheduler(config, await executor.start())
            if not await self.does(executor, Ping()):
                await executor.stop()
                pytest.skip("it does no pings")
            scheduler.add_requests(self.request(2))
            plan = scheduler.schedule()
            assert plan is not None
            future = executor.submit(plan, scheduler.in_process(plan))
            await executor.ask(Ping())
            assert future.done(), "it answered before the step was done"
            await executor.stop()

        self.run(scenario())

    def test_jobs_run_in_order_with_plans(self) -> None:
        """Jobs between the steps change no token, and a job that it does not know is refused."""

        class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
            pass

        async def scenario(jobs: bool) -> list[list[int]]:
            executor, config = self.make()
            info = await executor.start()
            assert info.steps_in_flight > 0
            scheduler = self.scheduler(config, info)
            requests = [self.request(number) for number in range(4)]
            scheduler.add_requests(*requests)
            if jobs:
                assert not await self.does(executor, Unknown())  # type: ignore[arg-type]
            while (plan := scheduler.schedule()) is not None:
                result = executor.submit(plan, scheduler.in_process(plan))
                if jobs and await self.does(executor, PrepareAhead()):
                    more = await executor.ask(PrepareAhead())
                    assert isinstance(more, bool)
                scheduler.update(plan, await result)
            await executor.stop()
            return [request.output_token_ids for request in requests]

        assert self.run(scenario(True)) == self.run(scenario(False))

    def test_experts_move_if_it_says_so(self, tmp_path: Path) -> None:
        """Of a mixture without weights, between two ranks."""
        if not self.registered().moves_experts:
            pytest.skip("it moves no experts")
        (tmp_path / "config.json").write_text(json.dumps(MIXTURE))

        async def scenario() -> None:
            executor, _ = self.make(
                model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True,
                tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=True,
            )  # fmt: skip
            info = await executor.start()
            assert info.num_ranks == 2, "experts move between ranks"
            await executor.ask(BalanceExperts(moves=False))
            moved = await executor.ask(BalanceExperts())
            assert isinstance(moved, int), "how many places got another expert"
            await executor.stop()

        self.run(scenario())

    def test_stopping_finishes_what_is_queued(self) -> None:
        async def scenario() -> None:
            executor, config = self.make()
            scheduler = self.scheduler(config, await executor.start())
            scheduler.add_requests(self.request(2))
            plans = [scheduler.schedule(), scheduler.schedule()]
            futures = [
                executor.submit(plan, NOTHING_IN_PROCESS) for plan in plans if plan is not None
            ]
            assert futures
            await executor.stop()
            for future in futures:
                await asyncio.wait_for(future, STUCK_SECONDS)

        self.run(scenario())

    def test_stopping_twice_or_before_the_start_is_harmless(self) -> None:
        async def scenario() -> None:
            executor, _ = self.make()
            await executor.stop()
            executor, _ = self.make()
            await executor.start()
            await executor.stop()
            await executor.stop()

        self.run(scenario())

    def test_two_live_side_by_side(self) -> None:
        """Two executors run in one process, and one is stopped while the other runs."""

        async def scenario() -> None:
            (first, config), (two, _) = self.make(), self.make()
            schedulers = [self.scheduler(config, await each.start()) for each in (first, two)]
            requests = [self.request(1), self.request(1)]
            for scheduler, request in zip(schedulers, requests, strict=True):
                scheduler.add_requests(request)
            await self.drive(first, schedulers[0])
            await first.stop()
            await self.drive(two, schedulers[1])
            await two.stop()
            assert requests[0].output_token_ids == requests[1].output_token_ids

        self.run(scenario())
