"""Profiles of an engine: the worker's trace, with what the step loop did meanwhile.

A trace is a JSON file in Chrome's format, which Perfetto reads.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ..config import ProfilerConfig
from ..errors import InvalidRequest, JackfieldError, RequestFailed
from ..protocols.executors import Executor
from ..step import StartProfile, StepPlan, StepResult, StopProfile
from .step_loop import StepLoop

logger = logging.getLogger("jackfield.engine")
PROCESS = 0
"""Process of the loop's spans in a trace."""
LOOP_THREAD = 1
STEP_THREADS = (2, 3, 4)
"""Its threads: what the loop does, and the steps in flight, in turn."""
EVENTS = b'"traceEvents": ['
BASE = re.compile(rb'"baseTimeNanoseconds": (\d+)')


class Timeline:
    """Spans of the step loop, in nanoseconds of Unix time."""

    def __init__(self, max_steps: int, full: Callable[[], None]) -> None:
        """full: called after the last step."""
        self.spans: list[tuple[str, int, int, int, dict[str, Any]]] = []
        """Name, thread, begin, end, arguments."""
        self._span_start = time.time_ns()
        self._submitted: dict[int, int] = {}
        """Step → time."""
        self._left = max_steps
        self._full = full

    def begin(self) -> None:
        self._span_start = time.time_ns()

    def planned(self, plan: StepPlan) -> None:
        now = self._submitted[plan.step] = time.time_ns()
        facts = {"step": plan.step, "tokens": plan.total_tokens, "rows": len(plan.slots)}
        self.spans.append(("plan", LOOP_THREAD, self._span_start, now, facts))

    def ended(self, plan: StepPlan, result: StepResult) -> None:
        now = self._span_start = time.time_ns()
        submitted = self._submitted.pop(plan.step, None)
        if submitted is not None:  # Else it began before the profile.
            name = f"step {plan.step}: {plan.total_tokens} tokens"
            facts = {"device_ms": round(result.device_seconds * 1000, 3)}
            thread = STEP_THREADS[plan.step % len(STEP_THREADS)]
            self.spans.append((name, thread, submitted, now, facts))

    def published(self, plan: StepPlan) -> None:
        self.spans.append(
            ("publish", LOOP_THREAD, self._span_start, time.time_ns(), {"step": plan.step})
        )
        self._left -= 1
        if self._left == 0:
            self._full()

    def events(self, base: int) -> list[dict[str, Any]]:
        """Return events in Chrome's format. base: nanoseconds of its time 0."""
        names = {LOOP_THREAD: "plan and publish", **dict.fromkeys(STEP_THREADS, "steps in flight")}
        meta = [_meta("process_name", LOOP_THREAD, "event loop")]
        meta += [_meta("thread_name", thread, name) for thread, name in names.items()]
        return meta + [
            {
                "ph": "X", "cat": "loop", "name": name, "pid": PROCESS, "tid": thread,
                "ts": (begin - base) / 1000, "dur": (end - begin) / 1000, "args": facts,
            }
            for name, thread, begin, end, facts in self.spans
        ]  # fmt: skip


def _meta(name: str, thread: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": PROCESS, "tid": thread, "args": {"name": value}}


class Profiler:
    """Profiles one engine, one profile at a time. For the event loop only."""

    def __init__(self, config: ProfilerConfig, steps: StepLoop, executor: Executor) -> None:
        self._config = config
        self._steps = steps
        self._executor = executor
        self._name = ""
        self._count = 0
        """Profiles so far."""
        self._timeline: Timeline | None = None
        """Timeline of the running profile."""
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[str] | None = None
        """Writes the last profile's trace; None once its path was returned."""

    async def start(self) -> None:
        """Raises InvalidRequest without a folder, and while a profile runs or is written."""
        config = self._config
        if not config.torch_profiler_dir:
            raise InvalidRequest(
                "start_profile: there is no folder for traces; start the server with "
                "--profiler-config.torch_profiler_dir FOLDER"
            )
        if self._timeline is not None or (self._writing and not self._writing.done()):
            raise InvalidRequest("start_profile: a profile runs already; call stop_profile first")
        self._count += 1
        self._name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._count}"
        self._writing = None
        self._timeline = Timeline(config.max_iterations, self._end)
        self._steps.timeline = self._timeline
        job = StartProfile(
            folder=config.torch_profiler_dir,
            name=self._name,
            with_stack=config.torch_profiler_with_stack,
            record_shapes=config.torch_profiler_record_shapes,
            with_memory=config.torch_profiler_with_memory,
        )
        try:
            await self._ask(job)
        except BaseException:
            self._end()
            raise
        if self._timeline is not None:  # Else the last step has ended it already.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(config.max_seconds, self._end)

    async def stop(self) -> str:
        """Return the path of the running profile's trace, or of one that a bound has ended.

        Raises InvalidRequest without any, RequestFailed if it cannot be written.
        """
        self._end()
        if self._writing is None:
            raise InvalidRequest("stop_profile: no profile runs; call start_profile first")
        try:
            path = await asyncio.shield(self._writing)
        except JackfieldError:
            self._writing = None
            raise
        self._writing = None
        return path

    def _end(self) -> None:
        timeline, self._timeline, self._steps.timeline = self._timeline, None, None
        if self._timer is not None:
            self._timer.cancel()
        if timeline is not None:
            self._writing = asyncio.get_running_loop().create_task(self._write(timeline))
            self._writing.add_done_callback(_log_failure)

    async def _write(self, timeline: Timeline) -> str:
        of_worker = Path(await self._ask(StopProfile()))
        path = Path(self._config.torch_profiler_dir or "") / f"{self._name}.trace.json.gz"
        try:
            await asyncio.to_thread(_merge, of_worker, timeline, path)
        except OSError as error:
            raise RequestFailed(f"stop_profile: {path} cannot be written: {error}") from error
        return str(path)

    async def _ask(self, job: StartProfile | StopProfile) -> Any:
        try:
            return await asyncio.shield(self._executor.ask(job))
        except NotImplementedError:
            raise InvalidRequest("this server's executor cannot profile its worker") from None
        except Exception as error:
            raise RequestFailed(f"the worker's profile failed: {error}") from error


def _log_failure(writing: asyncio.Task[str]) -> None:
    """Log, as no one may call `stop`."""
    if not writing.cancelled() and (error := writing.exception()) is not None:
        logger.error("a profile's trace was not written: %s", error)


def _merge(of_worker: Path, timeline: Timeline, path: Path) -> None:
    """Write the worker's trace with the loop's spans, compressed. Raises OSError.

    The loop's are put into the text: a trace takes long to decode.
    """
    text = of_worker.read_bytes() if of_worker.is_file() else b'{"traceEvents": []}'
    base = BASE.search(text)
    events = timeline.events(int(base[1]) if base else 0)
    own = b",".join(map(msgspec.json.encode, events))
    at = text.index(EVENTS) + len(EVENTS)
    comma = b"" if text[at : at + 64].lstrip().startswith(b"]") else b","
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file, gzip.open(file, "wb", compresslevel=3) as packed:
        for part in (text[:at], own, comma, text[at:]):
            packed.write(part)
    of_worker.unlink(missing_ok=True)
