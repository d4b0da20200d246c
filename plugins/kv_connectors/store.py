"""A connector over any store of bytes by key: subclass `StoreConnector`, write a `BlockStore`.

Blocks are stored by key, so blocks saved by one engine are found by every engine of the same model.
The store is accessed on threads; while it fails, nothing is loaded or saved.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Protocol

from ...core.parts.kv_transfer import KVReport
from ...core.protocols.kv import KVConnectorSetup
from ...core.request import Request
from .block_file import BlockFormat
from .copying import BlockCopier
from .threads import Job, JobList, Jobs, ThreadedWorker

logger = logging.getLogger("jackfield.kv")

LOOKUP_THREADS = 4
READ_THREADS = 4
WRITE_THREADS = 4
"""Threads that encode and store blocks: a digest takes a core 0.7 s for each GB."""
BLOCKS_AT_ONCE = 16
"""Blocks per copy between device and host."""
READ_AHEAD = 2 * BLOCKS_AT_ONCE
ANSWER_SECONDS = 10.0
"""Seconds after which a lookup or read has failed."""
PAUSE_SECONDS = 5.0
"""Seconds without requests to the store after a failure."""
MIN_BLOCKS_BEING_SAVED = 64
"""Most blocks held while they are saved, or a quarter of the cache; further blocks are not
saved."""


class BlockIndex(Protocol):
    """Keys at the far side: what the scheduler half needs of a store."""

    def count_present(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading `keys` that are stored."""

    def close(self) -> None:
        """Release resources; the store is not used any more."""


class BlockStore(BlockIndex, Protocol):
    """Bytes by key, at the far side."""

    def get(self, key: bytes) -> bytes | None:
        """Return the bytes stored under `key`, or None."""

    def put(self, key: bytes, data: bytes) -> None:
        """Store the bytes atomically, evicting others to make room."""

    def remove(self, key: bytes) -> None:
        """Discard `key`, whose content is damaged."""


class StoreConnector:
    """Base class of connectors over a store: register a subclass with `store_class`, which is
    created from the setup."""

    store_class: ClassVar[Any]
    """Called with the KVConnectorSetup, once for each half. → BlockStore; raises ConfigError."""
    metadata_type = Jobs
    compacted_caches = True

    @classmethod
    def make_scheduler(cls, setup: KVConnectorSetup) -> StoreScheduler:
        """Return the half on the event loop."""
        return StoreScheduler(setup, cls.store_class(setup))

    @classmethod
    def make_worker(cls, setup: KVConnectorSetup) -> StoreWorker:
        """Return the half on the device's side."""
        return StoreWorker(setup, cls.store_class(setup))


class Health:
    """Tracks whether a far side is usable."""

    def __init__(self, name: str = "the KV store") -> None:
        self._name = name
        self._until = 0.0

    @property
    def paused(self) -> bool:
        return time.monotonic() < self._until

    def failed(self, what: str, error: Exception) -> None:
        """Pause it, and log that once."""
        if not self.paused:
            logger.warning(
                "%s failed to %s, and is left alone for %.0f s: %s: %s",
                self._name, what, PAUSE_SECONDS, type(error).__name__, error,
            )  # fmt: skip
        self._until = time.monotonic() + PAUSE_SECONDS


@dataclass
class _Lookup:
    first: int
    answer: Future[int]
    """Number of consecutive stored blocks from `first`."""
    overdue: bool = False


class StoreScheduler:
    """Looks up keys on threads; passes jobs to the worker half."""

    def __init__(self, setup: KVConnectorSetup, store: BlockIndex) -> None:
        self._setup = setup
        self._store = store
        self._health = Health()
        self._jobs = JobList()
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, "jackfield-kv-lookup")
        self._lookups: dict[str, _Lookup] = {}
        self._saving: dict[int, int] = {}
        """Transfer → number of blocks."""
        self._room = max(MIN_BLOCKS_BEING_SAVED, setup.layout.num_blocks // 4)

    def num_external_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return None until a thread has the store's reply."""
        block_size = self._setup.layout.block_size
        first_block = num_computed_tokens // block_size
        lookup = self._lookups.get(request.request_id)
        # Blocks that the request had at the lookup may have been evicted.
        if lookup is None or first_block < lookup.first:
            if self._health.paused:
                return 0
            future = self.submit_lookup(request, request.block_hashes[first_block:])
            lookup = self._lookups[request.request_id] = _Lookup(first_block, future)
            future.add_done_callback(lambda _: self._setup.notify())
            asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._give_up, lookup)
            return None
        if not lookup.answer.done():
            if not lookup.overdue:
                return None
            self._health.failed("look up keys", TimeoutError(f"{ANSWER_SECONDS} s"))
            return 0
        del self._lookups[request.request_id]
        return max(0, lookup.first + lookup.answer.result() - first_block) * block_size

    def submit_lookup(self, request: Request, keys: Sequence[bytes]) -> Future[int]:
        """Begin to count the leading `keys` that are stored, on a thread."""
        return self._threads.submit(self._look_up, keys)

    def _give_up(self, lookup: _Lookup) -> None:
        # Set by the timer instead of comparing clocks: if a clock lagged, no call would follow.
        lookup.overdue = True
        self._setup.notify()

    def _look_up(self, keys: Sequence[bytes]) -> int:
        try:
            return self._store.count_present(keys)
        except Exception as error:
            self._health.failed("look up keys", error)
            return 0

    def start_load(
        self, transfer: int, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        self._jobs.loads.append(Job(transfer, tuple(block_ids), tuple(keys)))

    def start_save(
        self, transfer: int, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> Sequence[int]:
        """Queue saves within the limit; the worker half skips stored blocks."""
        count = min(len(keys), self._room)
        if count <= 0 or self._health.paused:
            return ()
        self.queue_save(Job(transfer, tuple(block_ids[:count]), tuple(keys[:count])))
        return block_ids[:count]

    @property
    def has_room(self) -> bool:
        """Whether more blocks may be held while they are saved."""
        return self._room > 0

    def queue_save(self, job: Job) -> None:
        """Pass a save to the worker half; its blocks are held until its end."""
        self._saving[job.transfer] = len(job.block_ids)
        self._room -= len(job.block_ids)
        self._jobs.saves.append(job)

    def request_finished(
        self, transfer: int, request: Request
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold no blocks: saves are independent."""
        self._lookups.pop(request.request_id, None)
        return False, None

    def build_metadata(self) -> Jobs | None:
        return self._jobs.take()

    def update(self, report: KVReport) -> None:
        """Free room for other saves."""
        for transfer in (*report.finished, *report.failed):
            self._room += self._saving.pop(transfer, 0)

    def close(self) -> None:
        """Let lookups in flight end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()


class StoreWorker(ThreadedWorker):
    """Moves blocks through host memory; damaged ones count as missing."""

    blocks_per_read: int = 1

    def __init__(self, setup: KVConnectorSetup, store: BlockStore) -> None:
        super().__init__(setup)
        self._store = store
        self._format = BlockFormat(setup.layout)
        self._health = Health()
        self._readers = ThreadPoolExecutor(READ_THREADS, "jackfield-kv-read")
        self._writers = ThreadPoolExecutor(WRITE_THREADS, "jackfield-kv-write")

    def load(self, job: Job, copier: BlockCopier, after: Any) -> Sequence[int]:
        """Load blocks up to the first missing one.

        Reads run ahead of the copies. A read that hangs writes to no block: only complete data is
        copied to the cache.
        """
        blocks = self._blocks(job.places)
        rows = copier.new_rows(min(BLOCKS_AT_ONCE, len(job.places)))
        num_loaded = 0
        while part := list(islice(blocks, len(rows))):
            for row, block in zip(rows, part, strict=False):
                row.numpy()[:] = block
            end = num_loaded + len(part)
            copier.write(job.block_ids[num_loaded:end], rows, range(len(part)), after)
            num_loaded = end
        return job.block_ids[num_loaded:]

    def _blocks(self, keys: Sequence[bytes]) -> Iterator[memoryview]:
        """Yield blocks, each [block_bytes], up to the first missing one."""
        size = self.blocks_per_read
        groups = iter([keys[first : first + size] for first in range(0, len(keys), size)])
        ahead = islice(groups, max(2, READ_AHEAD // size))
        reads = deque((len(group), self._readers.submit(self.read, group)) for group in ahead)
        try:
            while reads:
                count, read = reads.popleft()
                blocks = read.result(ANSWER_SECONDS)
                yield from blocks
                if len(blocks) < count:
                    break
                reads.extend(
                    (len(g), self._readers.submit(self.read, g)) for g in islice(groups, 1)
                )
        except TimeoutError as error:
            self._health.failed("read a block", error)
        finally:
            for _, read in reads:
                read.cancel()

    def read(self, keys: Sequence[bytes]) -> Sequence[memoryview]:
        """Return the leading blocks that are stored and sound; called with `blocks_per_read` keys
        at most, on several threads."""
        (key,) = keys
        if self._health.paused:
            return ()
        try:
            data = self._store.get(key)
        except Exception as error:
            self._health.failed("read a block", error)
            return ()
        if data is None:
            return ()
        try:
            return (self._format.decode(key, data),)
        except ValueError as error:
            logger.warning("block %s in the KV store is not used: %s", key.hex()[:16], error)
            self._remove(key)
            return ()

    def _remove(self, key: bytes) -> None:
        try:
            self._store.remove(key)
        except Exception as error:
            self._health.failed("remove a block", error)

    def save(self, job: Job, copier: BlockCopier) -> Sequence[int]:
        """Save new blocks; none while the store is paused."""
        if self._health.paused:
            return job.block_ids
        try:
            missing = [
                (block_id, key)
                for block_id, key in zip(job.block_ids, job.places, strict=True)
                if not self._store.count_present([key])
            ]
            if not missing:
                return ()
            rows = copier.new_rows(min(BLOCKS_AT_ONCE, len(missing)))
            for first in range(0, len(missing), len(rows)):
                part = missing[first : first + len(rows)]
                copier.read([block_id for block_id, _ in part], rows, range(len(part)))
                keys = [key for _, key in part]
                blocks = [memoryview(row.numpy()) for row in rows[: len(part)]]
                list(self._writers.map(self._write, keys, blocks))
        except Exception as error:
            self._health.failed("store a block", error)
            return job.block_ids
        return ()

    def _write(self, key: bytes, block: memoryview) -> None:
        self._store.put(key, self._format.encode(key, block))

    def finish(self) -> None:
        self._writers.shutdown(wait=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._store.close()
