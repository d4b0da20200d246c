"""Runs the server's batches at lower priority than its other requests, and resumes them after a
restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import msgspec
from aiohttp import web

from ...core.errors import EngineOverloaded, EngineStopped
from ...core.tenancy import ANYONE, Tenant
from ..http.context import ENGINE, OPTIONS
from ..http.options import BatchOptions
from .jsonl import Line, LineReader, Result, refused
from .results import ResultsFile
from .runner import BatchRunner, in_threads
from .schemas import (
    FINAL,
    Batch,
    BatchError,
    BatchErrors,
    BatchStatus,
    Conflict,
    NotFound,
)
from .storage import StorageFailed, storage
from .store import Store

logger = logging.getLogger("jackfield.server")
T = TypeVar("T")
PRIORITY = 1 << 20
"""Added to the requests' priority."""
RETRY_SECONDS = 5.0
"""Seconds between attempts to write to a full disk."""
MAX_UNFINISHED = 64
MAX_REQUESTS = 50_000
"""Limit of one batch, as in OpenAI's API."""
MAX_TOLD = 100
"""Number of invalid lines that a failed batch lists."""


class BatchWork:
    """Runs each unfinished batch in a task; they share the slots."""

    def __init__(
        self,
        app: web.Application,
        store: Store,
        options: BatchOptions,
    ) -> None:
        """app: a started application with the routes of lines."""
        self.app = app
        self.store = store
        self.max_line_bytes = app[OPTIONS].max_body_bytes
        limit = options.max_concurrency or max(1, app[ENGINE].config.max_num_seqs // 2)
        self._slots = asyncio.Semaphore(limit)
        self._jobs: dict[str, _Job] = {}
        self._creating = asyncio.Lock()

    async def resume(self) -> None:
        """Resume an earlier server's unfinished batches."""
        for batch in await self.store.call(self.store.unfinished):
            self._start(batch, await self.store.call(self.store.tenant, batch.id))

    async def close(self) -> None:
        """Stop all batches, which a later `resume` continues."""
        for job in self._jobs.values():
            job.task.cancel()
        await asyncio.gather(*(job.task for job in self._jobs.values()), return_exceptions=True)

    async def create(self, batch: Batch, tenant: Tenant = ANYONE) -> Batch:
        """Create and start a batch. Raises NotFound without the file, EngineOverloaded,
        Conflict.
        """
        async with self._creating:
            try:
                file = await self.store.call(self.store.file, batch.input_file_id, tenant.owner)
            except NotFound as error:
                raise NotFound(error.message, param="input_file_id") from None
            if file.purpose != "batch":
                raise Conflict(
                    f"input_file_id: the purpose of {file.id} is {file.purpose}, not batch",
                    param="input_file_id",
                )
            if len(self._jobs) >= MAX_UNFINISHED:
                raise EngineOverloaded(
                    f"{MAX_UNFINISHED} batches are unfinished; wait for one, or cancel it"
                )
            await self.store.call(self.store.put, batch, tenant)
            self._start(batch, tenant)
        return batch

    async def get(self, batch_id: str, owner: str | None = None) -> Batch:
        batch = await self.store.call(self.store.batch, batch_id, owner)
        job = self._jobs.get(batch_id)
        return job.batch if job else batch

    async def list(self, after: str | None, limit: int, owner: str | None = None) -> list[Batch]:
        batches = await self.store.call(self.store.batches, after, limit, owner)
        return [
            self._jobs[batch.id].batch if batch.id in self._jobs else batch for batch in batches
        ]

    async def cancel(self, batch_id: str, owner: str | None = None) -> Batch:
        """Cancel a batch. Raises NotFound, and Conflict if it has ended."""
        batch = await self.get(batch_id, owner)
        job = self._jobs.get(batch_id)
        if job is None or batch.status in FINAL or batch.status == "finalizing":
            raise Conflict(
                f"{batch_id} is {batch.status}: it cannot be cancelled", param="batch_id"
            )
        if batch.status != "cancelling":
            batch.turn("cancelling")
            job.cancel.set()
            try:
                await self.store.call(self.store.put, batch, job.tenant)
            except StorageFailed as error:
                # The final status is written when there is room again.
                logger.warning("%s is being cancelled: %s", batch_id, error.message)
        return batch

    def _start(self, batch: Batch, tenant: Tenant) -> None:
        job = self._jobs[batch.id] = _Job(self, batch, self._slots, tenant)
        job.task.add_done_callback(lambda _: self._jobs.pop(batch.id, None))


class _Cancelled(Exception):
    """Raised when a batch is cancelled while it waits for the disk."""


class _Job:
    def __init__(
        self, work: BatchWork, batch: Batch, slots: asyncio.Semaphore, tenant: Tenant
    ) -> None:
        self.work = work
        self.store = work.store
        self.batch = batch
        self.tenant = tenant
        self.cancel = asyncio.Event()
        if batch.status == "cancelling":
            self.cancel.set()
        # Under fcfs, requests may not have a priority.
        ordered = work.app[ENGINE].config.scheduling_policy == "fcfs"
        priority = 0 if ordered else PRIORITY
        self._runner = BatchRunner(work.app, slots, priority=priority, tenant=tenant)
        self._reader = LineReader(
            self.store.content(batch.input_file_id), (batch.endpoint,), work.max_line_bytes
        )
        self._files: dict[bool, ResultsFile] = {}
        """Success or not → file of results."""
        self.task = asyncio.create_task(self._run(), name=f"jackfield-{batch.id}")

    async def _run(self) -> None:
        try:
            await self._whole()
        except EngineStopped:
            logger.info("%s waits for the next start", self.batch.id)
        except _Cancelled:
            await self._end("cancelled")
        except Exception:
            logger.exception("%s failed", self.batch.id)
            error = BatchError("server_error", "the server failed on this batch")
            await self._end("failed", [error])
        finally:
            self._close_files()

    async def _whole(self) -> None:
        batch = self.batch
        if batch.status == "validating":
            total, errors = await asyncio.to_thread(self._validate)
            if errors:
                return await self._end("failed", errors)
            batch.request_counts.total = total
        if batch.status == "validating":
            batch.turn("in_progress")
            await self._stored(lambda: self.store.call(self.store.put, batch, self.tenant))
        await self._stored(lambda: asyncio.to_thread(self._open_files))
        self._count()
        if await self._requests():
            batch.turn("finalizing")
            await self._stored(
                lambda: self.store.call(self.store.put, batch, self.tenant), until_done=True
            )
            return await self._end("completed")
        if self.cancel.is_set():
            return await self._end("cancelled")
        async for line in in_threads(self._missing()):
            text = "the request was not executed before the completion window expired"
            await self._deliver(refused(line, "batch_expired", text))
        await self._end("expired")

    def _validate(self) -> tuple[int, list[BatchError]]:
        errors: list[BatchError] = []
        total = 0
        for line in self._reader:
            total += 1
            if total > MAX_REQUESTS:
                text = f"a batch has {MAX_REQUESTS} requests at most"
                return total, [BatchError("too_many_requests", text, param="input_file_id")]
            if line.error is not None and len(errors) < MAX_TOLD:
                error = line.error
                errors.append(BatchError(error.code, error.message, error.line, error.param))
        if not total:
            errors.append(BatchError("empty_file", "the file has no requests"))
        return total, errors

    async def _requests(self) -> bool:
        """Run the requests; return False if the batch was cancelled or expired."""
        running = asyncio.ensure_future(self._runner.run(self._missing(), self._deliver))
        stop = asyncio.ensure_future(self.cancel.wait())
        try:
            await asyncio.wait(
                (running, stop),
                timeout=max(0.0, self.batch.expires_at - time.time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if running.done():
                running.result()
                return True
            return False
        finally:
            for task in (running, stop):
                task.cancel()
            await asyncio.gather(running, stop, return_exceptions=True)

    def _missing(self) -> Iterator[Line]:
        results = [file.done for file in self._files.values()]
        for line in self._reader:
            if not any(line.id in ids for ids in results):
                yield line

    async def _deliver(self, result: Result) -> None:
        await self._stored(lambda: self._append(result))
        self._count()

    async def _append(self, result: Result) -> None:
        # If cancelled during a write, finish the write before closing the file.
        writing = asyncio.ensure_future(asyncio.to_thread(self._files[result.ok].append, result))
        try:
            await asyncio.shield(writing)
        finally:
            await writing

    async def _stored(self, write: Callable[[], Awaitable[T]], *, until_done: bool = False) -> T:
        """Call `write`, retrying while the disk does not accept it.

        The batch's `errors` report this. Raises _Cancelled on cancellation, unless `until_done`.
        """
        waiting: BatchErrors | None = None
        while True:
            try:
                with storage("the batch waits to be written"):
                    result = await write()
            except StorageFailed as error:
                if waiting is None:
                    logger.warning("%s: %s", self.batch.id, error.message)
                    waiting = BatchErrors([BatchError(error.code or "storage", error.message)])
                    self.batch.errors = waiting
            else:
                if waiting is not None and self.batch.errors is waiting:
                    self.batch.errors = None
                return result
            if until_done:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.cancel.wait(), RETRY_SECONDS)
                raise _Cancelled

    def _count(self) -> None:
        counts = self.batch.request_counts
        counts.completed, counts.failed = (len(self._files[ok].done) for ok in (True, False))

    def _open_files(self) -> None:
        for ok, part in ((True, "output"), (False, "errors")):
            self._files[ok] = ResultsFile(self.store.results(self.batch, part))

    def _close_files(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _lost_results(self, batch: Batch) -> str | None:
        """Return what is lost if results were removed; None: nothing."""
        for ok, part in ((True, "output"), (False, "errors")):
            if ok in self._files and self._files[ok].done:
                if not self.store.has_results(batch, part):
                    return "the results were removed from the server's disk"
        return None

    async def _end(self, status: BatchStatus, errors: list[BatchError] | None = None) -> None:
        def close() -> None:
            for file in self._files.values():
                file.close()

        async def finish() -> Batch:
            await asyncio.to_thread(close)
            # A copy, so that the status is not visible before the files that come with it.
            batch = msgspec.structs.replace(self.batch, errors=None)
            if errors:
                batch.errors = BatchErrors(errors)
            lost = await self.store.call(self._lost_results, batch)
            if lost:
                batch.errors = BatchErrors([BatchError("storage_failed", lost)])
            batch.turn("failed" if lost else status)
            await self.store.call(self.store.finish, batch, self.tenant)
            return batch

        self.batch = await self._stored(finish, until_done=True)
