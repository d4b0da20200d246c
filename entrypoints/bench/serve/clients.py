"""Sends a load from several processes, if one client cannot keep up.

Each process runs this module: it reads its share, reports that it is ready, starts at a given time
(`time.perf_counter` is common to processes), and writes each response as a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from .load import Done, Load, RequestResult, Target, drive

MODULE = "jackfield.entrypoints.bench.serve.clients"
LINE_BYTES = 1 << 28
HEAD_START_SECONDS = 0.05
READY = b"ready\n"
T = TypeVar("T")


class Job(msgspec.Struct, frozen=True):
    """Input of a process: a line of JSON."""

    target: Target
    load: Load


class LoadResult(NamedTuple):
    results: list[RequestResult]
    seconds: float
    """From the first request's due time to the last token."""
    cpu_share: float
    """Busiest client's share of a core: near 1, the client limits the measurement."""


async def send_load(
    target: Target, load: Load, *, processes: int = 1, done: Done = lambda _: None
) -> LoadResult:
    """Send a load from one process or several."""
    if processes == 1:
        gc.collect()
        gc.freeze()
        try:
            cpu, begin = time.process_time(), time.perf_counter()
            results = await drive(target, load, begin=begin, done=done)
            return _sent(results, begin, [time.process_time() - cpu])
        finally:
            gc.unfreeze()
    shares = list(load.split(processes))
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_client(target, share)) for share in shares]
        begin = time.perf_counter() + HEAD_START_SECONDS
        outcomes = await asyncio.gather(*(_collect(each, begin, done) for each in clients))
    results = [result for results, _ in outcomes for result in results]
    return _sent(results, begin, [cpu for _, cpu in outcomes])


def _sent(results: list[RequestResult], begin: float, cpu: Sequence[float]) -> LoadResult:
    last = max((result.times[-1] for result in results if result.times), default=begin)
    seconds = last - begin if last > begin else time.perf_counter() - begin
    return LoadResult(results, seconds, max(cpu) / seconds)


@contextlib.asynccontextmanager
async def _client(target: Target, load: Load) -> AsyncIterator[asyncio.subprocess.Process]:
    """Yield a process that is ready to send."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", MODULE, limit=LINE_BYTES,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(Job(target, load)) + b"\n")
        await process.stdin.drain()
        if await process.stdout.readline() != READY:
            raise RuntimeError(f"a client process ended with status {await process.wait()}")
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()


async def _collect(
    process: asyncio.subprocess.Process, begin: float, done: Done
) -> tuple[list[RequestResult], float]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{begin!r}\n".encode())
    process.stdin.write_eof()
    results: list[RequestResult] = []
    async for line in process.stdout:
        if not line.startswith(b"{"):
            await process.wait()
            return results, float(line)
        results.append(msgspec.json.decode(line, type=RequestResult))
        done(results[-1])
    raise RuntimeError(f"a client process ended with status {await process.wait()}")


def on_event_loop(main: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    result: T = uvloop.run(main)
    return result


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    out = sys.stdout.buffer
    gc.freeze()
    out.write(READY)
    out.flush()
    begin = float(sys.stdin.buffer.readline())
    before = _cpu()

    # Responses are written after the end: written one by one, they would take time from those that
    # are still running.
    results = on_event_loop(drive(job.target, job.load, begin=begin))
    cpu = _cpu() - before
    for result in results:
        out.write(msgspec.json.encode(result) + b"\n")
    out.write(f"{cpu!r}\n".encode())


def _cpu() -> float:
    rusage = resource.getrusage(resource.RUSAGE_SELF)
    return rusage.ru_utime + rusage.ru_stime


if __name__ == "__main__":
    main()
