"""One rank, in this process, on a thread of its own.

Imports nothing large: `auto` asks this class for its number of ranks before processes are started.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...core.config import EngineConfig
from ...core.protocols.executors import Executor, ExecutorInfo
from ...core.registry import Plugins
from ...core.step import LASTING, InProcess, Ping, StepPlan, StepResult, WorkerJob
from ...core.worker.threads import WorkerThread
from .awaited import last

if TYPE_CHECKING:
    from ...core.loading.model_config import ModelConfig


class InProcessExecutor(Executor):
    """Runs plans on a worker thread beside the event loop."""

    data_parallel = True

    def __init__(self, config: EngineConfig, model_config: ModelConfig, plugins: Plugins) -> None:
        from ...core.worker.worker import Worker

        self._worker = Worker(config, model_config, plugins)
        self._thread: WorkerThread | None = None

    @staticmethod
    def initialize_device(config: EngineConfig, plugins: Plugins) -> None:
        """Initialize the device."""
        from ...core.worker.start.device_init import initialize_device

        initialize_device(config, plugins)

    def watch_transfers(self, callback: Callable[[], None]) -> None:
        """The connector's threads call from outside the loop, perhaps after its end."""
        loop = asyncio.get_running_loop()

        def news() -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(callback)

        self._worker.transfer_news = news

    async def start(self) -> ExecutorInfo:
        """Load the model on the worker thread."""
        on_time = self._worker.device.type != "cpu"
        self._thread = WorkerThread(asyncio.get_running_loop(), on_time=on_time)
        return await self._thread.call(self._worker.start)

    def submit(self, plan: StepPlan, in_process: InProcess) -> asyncio.Future[StepResult]:
        """Queue one step."""
        assert self._thread is not None, "start() must be called first"
        return self._thread.step(lambda: self._worker.step(plan, in_process))

    def ask(self, job: WorkerJob) -> asyncio.Future[Any]:
        """Queue one job on the launch thread; a ping passes through both threads."""
        assert self._thread is not None, "start() must be called first"
        if isinstance(job, Ping):
            return self._thread.step(_Nothing)
        done = self._thread.call(lambda: self._worker.run_job(job))
        return asyncio.ensure_future(last(done)) if isinstance(job, LASTING) else done

    async def stop(self) -> None:
        """Finish what is queued, free the device."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        await thread.call(self._worker.stop)
        await thread.close()


class _Nothing:
    """A step without work."""

    def wait(self) -> None:
        return None
