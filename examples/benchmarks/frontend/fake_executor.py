"""An executor without a model: every stream gets the same script, one token per step."""

from __future__ import annotations

import asyncio
import collections
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from jackfield.core.config import EngineConfig
from jackfield.core.loading.model_config import ModelConfig
from jackfield.core.protocols.executors import Executor, ExecutorInfo
from jackfield.core.registry import Plugins
from jackfield.core.step import InProcess, StepPlan, StepResult, WorkerJob

NUM_BLOCKS = 1 << 16
LOOK = 16
"""Steps between two readings of other processes' time."""
SLOW = 0.02
"""Seconds per step until all requests run, so that the first do not end before the last start."""


class Clock(msgspec.Struct):
    """A point in time, with the processor time that this process had used by then."""

    steps: int
    wall: float
    user: float
    system: float
    """Time inside the kernel, mainly for sockets."""
    parts: dict[str, int]
    """Value of `ScriptedExecutor.parts`."""
    others: list[float]
    """Processor time of each process in `ScriptedExecutor.others`."""

    @classmethod
    def now(cls, steps: int, parts: dict[str, int], others: Sequence[int]) -> Clock:
        rusage = resource.getrusage(resource.RUSAGE_SELF)
        times = [cpu_seconds(pid) for pid in others]
        return cls(steps, time.perf_counter(), rusage.ru_utime, rusage.ru_stime, dict(parts), times)


def cpu_seconds(pid: int) -> float:
    """Return the processor time that another process has used, in steps of a hundredth of a
    second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class ScriptedExecutor(Executor):
    """Ends a step when the next one is submitted, after the work that the event loop has queued by
    then: each step's tokens are delivered before the next ones arrive, without idle time in
    between.

    `rows`: the clock is read at the first and at the last step in which this many requests decode
    together.
    """

    def __init__(self, script: Sequence[int], rows: int, seconds: float = 0.0) -> None:
        """seconds: shortest time of a step, for clients that have to keep up; 0: a step ends as
        described above."""
        self.script = list(script)
        self.rows = rows
        self.seconds = seconds
        self.others: list[int] = []
        """Ids of processes whose time is recorded, too."""
        self.begin: Clock | None = None
        self.end: Clock | None = None
        self.parts: dict[str, int] = {}
        """Nanoseconds by part of the step, if they are measured."""
        self._said: dict[int, int] = {}
        """Slot → number of tokens sampled."""
        self._full_steps = 0
        self._due = 0.0
        """When the last submitted step is to end, if steps take time."""
        self._running: collections.deque[tuple[asyncio.Future[StepResult], StepResult]]
        self._running = collections.deque()
        self._ended = 0
        self._timer: asyncio.TimerHandle | None = None

    def __call__(
        self, config: EngineConfig, model_config: ModelConfig, plugins: Plugins
    ) -> ScriptedExecutor:
        """Return itself: called in place of an executor's class."""
        return self

    async def start(self) -> ExecutorInfo:
        """Do nothing: there is nothing to load."""
        self._loop = asyncio.get_running_loop()
        return ExecutorInfo(
            num_blocks=NUM_BLOCKS,
            device="none",
            dtype="float32",
            attention_backend="none",
            attention_reason="scripted",
            weight_bytes=0,
            kv_cache_bytes=0,
            load_seconds=0.0,
        )

    def submit(self, plan: StepPlan, in_process: InProcess) -> asyncio.Future[StepResult]:
        """Start a step that returns the script's next token for each row that samples."""
        self._note(plan)
        future: asyncio.Future[StepResult] = self._loop.create_future()
        result = StepResult(plan.step, list(map(int, plan.samples)), self.tokens(plan))
        self._running.append((future, result))
        if self.begin is not None and len(self._running) > 1:
            if self.seconds:
                self._due = max(self._due, self._loop.time()) + self.seconds
                self._loop.call_at(self._due, self._end_step)
            else:
                self._loop.call_soon(self._end_step)
        if self._timer is None:
            self._timer = self._loop.call_later(SLOW, self._look, self._ended)
        return future

    def tokens(self, plan: StepPlan) -> list[int]:
        """[number of rows that sample]"""
        positions, script = self._said, self.script
        for start in plan.starts:
            positions[start.slot] = len(start.token_ids) - start.num_prompt_tokens
        length = len(script)
        token_ids = []
        for slot, samples in zip(plan.slots, plan.samples, strict=True):
            if not samples:
                continue
            at = positions[slot]
            positions[slot] = at + 1
            token_ids.append(script[at % length])
        return token_ids

    def ask(self, job: WorkerJob) -> asyncio.Future[Any]:
        """Do no job."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Do nothing: there is nothing to free."""

    def forget(self) -> None:
        """Reset the measurements before the next trial."""
        self.begin = self.end = None
        self._full_steps = 0

    def _note(self, plan: StepPlan) -> None:
        if len(plan.slots) < self.rows or plan.total_tokens != self.rows:
            return
        self._full_steps += 1
        if self.others and self.begin is not None and self._full_steps % LOOK:
            return
        now = Clock.now(self._full_steps, self.parts, self.others)
        if self.begin is None:
            self.begin = now
        self.end = now

    def _end_step(self) -> None:
        if self._running:
            self._ended += 1
            future, result = self._running.popleft()
            if not future.done():
                future.set_result(result)

    def _look(self, ended: int) -> None:
        """End a step if no other one follows."""
        self._timer = None
        if self._ended == ended:
            self._end_step()
        if self._running:
            self._timer = self._loop.call_later(SLOW, self._look, self._ended)
