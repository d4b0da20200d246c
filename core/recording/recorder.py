"""Records what passes through an executor."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from ..config import EngineConfig
from ..protocols.executors import Executor, ExecutorInfo, RankState
from ..step import (
    InProcess,
    ModelFingerprint,
    Ping,
    PrepareAhead,
    StartProfile,
    StepPlan,
    StepResult,
    StopProfile,
    WorkerJob,
)
from .recording import FORMAT, Entry, FailureEntry, Header, JobEntry, PlanEntry, ResultEntry, Writer

logger = logging.getLogger("jackfield.engine")
LIBRARIES = ("jackfield", "torch", "triton", "numpy", "xgrammar", "llguidance")
"""Distributions that affect results."""


def versions() -> dict[str, str]:
    numbers = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            numbers[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return numbers


async def model_fingerprint(executor: Executor) -> bytes | None:
    try:
        fingerprint: bytes = await executor.ask(ModelFingerprint())
    except NotImplementedError:
        return None
    return fingerprint


async def prepare_all(executor: Executor) -> None:
    """Prepare everything, so that graphs do not depend on idle times."""
    try:
        while await executor.ask(PrepareAhead()):
            pass
    except NotImplementedError:
        return


class RecordingExecutor(Executor):
    """Passes everything to a started executor, on the event loop.

    The recording ends early, with a warning, at the file's limit, on write errors, and at a plan
    that cannot be encoded; the engine continues.
    """

    def __init__(
        self, executor: Executor, info: ExecutorInfo, writer: Writer, max_bytes: int
    ) -> None:
        self.executor = executor
        self._info = info
        self._writer: Writer | None = writer
        self._max_bytes = max_bytes
        self._num_plans = 0

    @classmethod
    async def begin(
        cls, executor: Executor, writer: Writer, config: EngineConfig, info: ExecutorInfo
    ) -> RecordingExecutor:
        await prepare_all(executor)
        recording = cls(executor, info, writer, int(config.record_steps_max_gb * 1e9))
        header = Header(
            format=FORMAT,
            versions=versions(),
            config=config,
            info=info,
            fingerprint=await model_fingerprint(executor),
        )
        recording._write(header)
        return recording

    def submit(self, plan: StepPlan, in_process: InProcess) -> asyncio.Future[StepResult]:
        """Queue a step; plans that the executor does not take are not recorded."""
        future = self.executor.submit(plan, in_process)
        self._write(PlanEntry(plan))
        self._num_plans += 1
        # Called before what the step loop adds: the result is written before the next plan is.
        future.add_done_callback(lambda done: self._note_result(plan, done))
        return future

    def ask(self, job: WorkerJob) -> asyncio.Future[Any]:
        if not isinstance(job, Ping | StartProfile | StopProfile):
            self._write(JobEntry(job))
        return self.executor.ask(job)

    def ranks(self) -> Sequence[RankState]:
        return self.executor.ranks()

    def watch_transfers(self, callback: Callable[[], None]) -> None:
        """Recordings are made without a KV connector: there is nothing to watch."""

    async def start(self) -> ExecutorInfo:
        return self._info

    async def stop(self) -> None:
        await self.executor.stop()
        await asyncio.sleep(0)  # Let the last results be written.
        self._end()

    def _note_result(self, plan: StepPlan, future: asyncio.Future[StepResult]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._write(ResultEntry(future.result()))
        else:
            self._write(FailureEntry(plan.step, f"{type(error).__name__}: {error}"))

    def _write(self, item: Header | Entry) -> None:
        writer = self._writer
        if writer is None:
            return
        try:
            writer.write(item)
        except Exception as error:
            logger.warning(
                "the recording %s ends after %d steps: %s: %s",
                writer.path, self._num_plans, type(error).__name__, error,
            )  # fmt: skip
            self._end()
            return
        if writer.num_bytes > self._max_bytes:
            logger.warning(
                "the recording %s ends after %d steps: it has reached record_steps_max_gb",
                writer.path, self._num_plans,
            )  # fmt: skip
            self._end()

    def _end(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                logger.warning("the recording %s could not be finished: %s", writer.path, error)
