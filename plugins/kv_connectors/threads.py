"""Base class of worker halves: one thread loads, one saves."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from ...core.parts.kv_transfer import KVReport
from ...core.protocols.kv import KVConnectorSetup
from .copying import BlockCopier, cuda

logger = logging.getLogger("jackfield.kv")


class Job(msgspec.Struct, frozen=True):
    transfer: int
    block_ids: tuple[int, ...]
    places: tuple[Any, ...]
    """[len(block_ids)] Key or number of each block on the far side."""


class Jobs(msgspec.Struct, frozen=True):
    loads: tuple[Job, ...] = ()
    saves: tuple[Job, ...] = ()


class JobList:
    def __init__(self) -> None:
        self.loads: list[Job] = []
        self.saves: list[Job] = []

    def take(self) -> Jobs | None:
        """Return and clear all transfers; None if empty."""
        if not self.loads and not self.saves:
            return None
        jobs = Jobs(tuple(self.loads), tuple(self.saves))
        self.loads, self.saves = [], []
        return jobs


class ThreadedWorker:
    """Subclasses implement `load` and `save`; each is called on its own thread."""

    def __init__(self, setup: KVConnectorSetup) -> None:
        self.setup = setup
        self._loads: queue.SimpleQueue[tuple[Job, Any] | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[tuple[Job, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._finished: list[int] = []
        self._failed: dict[int, tuple[int, ...]] = {}
        self._threads: list[threading.Thread] = []
        self._closing = False

    def load(self, job: Job, copier: BlockCopier, after: Any) -> Sequence[int]:
        """Fill `job.block_ids`, writing after the event `after` → the blocks not filled. After an
        exception, none counts as filled.
        """
        raise NotImplementedError

    def save(self, job: Job, copier: BlockCopier) -> Sequence[int]:
        """Store `job.block_ids` → the blocks not stored. After an exception, none was."""
        raise NotImplementedError

    def copier(self, kv_caches: Sequence[torch.Tensor]) -> BlockCopier:
        """Return a copier for one thread."""
        return BlockCopier(kv_caches)

    def finish(self) -> None:
        """Release resources, when both threads have ended."""

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        self._device = kv_caches[0].device
        for name, run, jobs in (
            ("load", self._run_load, self._loads),
            ("save", self._run_save, self._saves),
        ):
            thread = threading.Thread(
                target=self._serve,
                args=(jobs, run, self.copier(kv_caches)),
                name=f"jackfield-kv-{name}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def start(self, metadata: Jobs) -> None:
        after = None
        if metadata.loads and self._device.type == "cuda":
            after = cuda.Event()
            after.record()
        for job in metadata.loads:
            self._loads.put((job, after))
        for job in metadata.saves:
            self._saves.put((job, None))

    def poll(self) -> KVReport | None:
        if not self._finished and not self._failed:
            return None
        with self._lock:
            report = KVReport(finished=tuple(self._finished), failed=self._failed)
            self._finished, self._failed = [], {}
        return report

    def close(self) -> None:
        """Finish saves, drop loads."""
        self._closing = True
        self._loads.put(None)
        self._saves.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        self.finish()

    def _serve(
        self,
        jobs: queue.SimpleQueue[tuple[Job, Any] | None],
        run: Callable[[Job, BlockCopier, Any], Sequence[int]],
        copier: BlockCopier,
    ) -> None:
        while (queued := jobs.get()) is not None:
            job, after = queued
            failed: Sequence[int]
            try:
                failed = run(job, copier, after)
            except Exception:
                logger.exception("a KV transfer of %d blocks failed", len(job.block_ids))
                failed = job.block_ids
            copier.synchronize()
            with self._lock:
                if failed:
                    self._failed[job.transfer] = tuple(failed)
                else:
                    self._finished.append(job.transfer)
            self.setup.notify()

    def _run_load(self, job: Job, copier: BlockCopier, after: Any) -> Sequence[int]:
        return job.block_ids if self._closing else self.load(job, copier, after)

    def _run_save(self, job: Job, copier: BlockCopier, after: Any) -> Sequence[int]:
        return self.save(job, copier)
