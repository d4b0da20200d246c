"""An executor whose ranks are threads of this process, for tests of what each of them does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from jackfield.core.hooks import hookimpl
from jackfield.core.protocols.executors import ExecutorInfo
from jackfield.core.step import (
    LASTING,
    NOTHING_IN_PROCESS,
    InProcess,
    Ping,
    StepPlan,
    WorkerJob,
)
from jackfield.core.worker.threads import WorkerThread
from jackfield.core.worker.worker import Worker
from jackfield.plugins.conformance.rank_threads import thread_ranks


class RankThreads:
    """Gives each rank the same plans and jobs, and compares what those of the last stage say. The
    first rank alone has the objects of this process."""

    tensor_parallel = pipeline_parallel = moves_experts = True
    delays: tuple[float, ...] = ()
    """Seconds that each rank waits before each call, over and over; (): none."""

    def __init__(self, config: Any, model_config: Any, plugins: Any) -> None:
        self.workers = [
            Worker(config, model_config, plugins, ranks)
            for ranks in thread_ranks(
                config.tensor_parallel_size,
                config.pipeline_parallel_size,
                partition=config.pipeline_layer_partition,
            )
        ]
        self.stage_size = config.tensor_parallel_size
        self.threads: list[WorkerThread] = []

    async def start(self) -> ExecutorInfo:
        loop = asyncio.get_running_loop()
        self.threads = [WorkerThread(loop) for _ in self.workers]
        infos = await asyncio.gather(*self._on_each(lambda worker, _: worker.start()))
        assert len({(info.num_blocks, info.cache_groups) for info in infos}) == 1
        first: ExecutorInfo = infos[0]
        return first

    def _on_each(self, call: Callable[[Worker, int], Any], step: bool = False) -> list[Any]:
        def run(worker: Worker, rank: int) -> Any:
            if self.delays:
                time.sleep(self.delays[rank])
            return call(worker, rank)

        return [
            (thread.step if step else thread.call)(lambda w=worker, r=rank: run(w, r))
            for rank, (thread, worker) in enumerate(zip(self.threads, self.workers, strict=True))
        ]

    def submit(self, plan: StepPlan, in_process: InProcess) -> Any:
        def step(worker: Worker, rank: int) -> Any:
            return worker.step(plan, NOTHING_IN_PROCESS if rank else in_process)

        return asyncio.ensure_future(self._alike(self._on_each(step, step=True)))

    async def _alike(self, futures: list[Any]) -> Any:
        first, *others = (await asyncio.gather(*futures))[: self.stage_size]
        for other in others:
            assert other.counts == first.counts and other.token_ids == first.token_ids
            assert (other.logprobs, other.pooled) == (first.logprobs, first.pooled)
            assert other.prompt_logprobs == first.prompt_logprobs
        return first

    def ask(self, job: WorkerJob) -> Any:
        if isinstance(job, Ping):
            return asyncio.ensure_future(asyncio.sleep(0))

        async def answer() -> Any:
            answers = await asyncio.gather(*self._on_each(lambda worker, _: worker.run_job(job)))
            if isinstance(job, LASTING):
                answers = await asyncio.gather(*map(asyncio.wrap_future, answers))
            return answers[0]

        return asyncio.ensure_future(answer())

    async def stop(self) -> None:
        threads, self.threads = self.threads, []
        for thread, worker in zip(threads, self.workers, strict=False):
            await thread.call(worker.stop)
            await thread.close()


class Plugin:
    """Registers it."""

    jackfield_api = 3

    def __init__(self, executor: type = RankThreads) -> None:
        self.executor = executor

    @hookimpl
    def register_executors(self, registry: Any) -> None:
        registry.add("rank_threads", self.executor)
