"""Host memory as a second tier under the prefix cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
from msgspec import Meta

from ...core.errors import ConfigError, OutOfMemory
from ...core.parts.kv_transfer import KVReport
from ...core.protocols.kv import KVConnectorSetup
from ...core.request import Request
from .copying import BlockCopier, cuda
from .eviction import Eviction, SavedBlocks
from .options import read_options
from .reduced_blocks import ReducedType, ReducingCopier, reduced_bytes
from .threads import Job, JobList, Jobs, ThreadedWorker


class CpuOffloadOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of cpu_offload."""

    kv_offloading_size: Annotated[float, Meta(gt=0)] = 4.0
    """GiB of host memory of all ranks together, taken at start."""
    kv_offloading_dtype: Literal["auto"] | ReducedType = "auto"
    """Type in which blocks are kept; auto: bit for bit as the cache has them."""
    kv_offloading_eviction: Eviction = "recency"
    """Which block goes when the memory is full: by recency, frequency or importance."""


class CpuOffloadConnector:
    shared = False
    metadata_type = Jobs
    compacted_caches = True
    per_rank = True

    @classmethod
    def make_scheduler(cls, setup: KVConnectorSetup) -> CpuOffloadScheduler:
        return CpuOffloadScheduler(setup)

    @classmethod
    def make_worker(cls, setup: KVConnectorSetup) -> CpuOffloadWorker:
        return CpuOffloadWorker(setup)


class BlockRows(NamedTuple):
    num_rows: int
    row_bytes: int
    stored: Literal["auto"] | ReducedType

    @classmethod
    def of(cls, setup: KVConnectorSetup, kind: type[CpuOffloadOptions]) -> BlockRows:
        """Return as many rows as fit. Raises ConfigError if none does."""
        options = read_options(setup.transfer.kv_connector_extra_config, kind)
        stored, here = options.kv_offloading_dtype, setup.layout.block_bytes
        row_bytes, everywhere = here, here + setup.layout.bytes_elsewhere
        if stored != "auto":
            row_bytes = reduced_bytes(setup.layout, stored)
            # Blocks of all ranks shrink alike: all count as many rows.
            everywhere = -(-everywhere * row_bytes // here)
        rows = int(options.kv_offloading_size * (1 << 30)) // everywhere
        if rows < 1:
            raise ConfigError(
                f"kv_connector_extra_config.kv_offloading_size: {options.kv_offloading_size} GiB "
                f"do not hold one block of {everywhere} bytes",
                param="kv_transfer_config",
            )
        return cls(rows, row_bytes, stored)


class CpuOffloadScheduler:
    """Rows by block key, evicted in a chosen order. Rows in a transfer are never reassigned."""

    options: type[CpuOffloadOptions] = CpuOffloadOptions

    def __init__(self, setup: KVConnectorSetup) -> None:
        self._block_size = setup.layout.block_size
        self._unused = iter(range(BlockRows.of(setup, self.options).num_rows))
        """Rows never used; possibly very many."""
        self._free: list[int] = []
        options = read_options(setup.transfer.kv_connector_extra_config, self.options)
        self._rows = SavedBlocks(options.kv_offloading_eviction)
        self._saving: dict[int, tuple[int, list[tuple[bytes, int]]]] = {}
        """Transfer → its request's priority, and keys and rows."""
        self._keys_being_saved: set[bytes] = set()
        self._loading: dict[int, list[int]] = {}
        self._readers: Counter[int] = Counter()
        self._jobs = JobList()

    def num_external_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Return the number of saved tokens, without waiting. Blocks that the device has are marked
        as used, too.
        """
        first = num_computed_tokens // self._block_size
        end = first
        for key in request.block_hashes[first:]:
            if key not in self._rows:
                break
            end += 1
        # Last block first, so that the tail of a prefix is evicted first.
        for key in reversed(request.block_hashes[:end]):
            self._rows.use(key, request.priority)
        return (end - first) * self._block_size

    def start_load(
        self, transfer: int, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        """Queue a load. Evicted blocks are reported as not filled."""
        rows = []
        for key in keys:
            if (row := self._rows.row(key)) is None:
                break
            rows.append(row)
        self._loading[transfer] = rows
        self._readers.update(rows)
        self._jobs.loads.append(Job(transfer, tuple(block_ids), tuple(rows)))

    def start_save(
        self, transfer: int, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> Sequence[int]:
        """Queue saves of new blocks, as far as rows are available."""
        selection = []
        for key, block_id in zip(keys, block_ids, strict=True):
            if key in self._rows or key in self._keys_being_saved:
                continue
            row = self._take_row()
            if row is None:
                break
            selection.append((key, row, block_id))
        if selection:
            saved = [(key, row) for key, row, _ in selection]
            self._saving[transfer] = request.priority, saved
            self._keys_being_saved.update(key for key, _, _ in selection)
            blocks = tuple(block_id for _, _, block_id in selection)
            self._jobs.saves.append(Job(transfer, blocks, tuple(row for _, row, _ in selection)))
        return [block_id for _, _, block_id in selection]

    def _take_row(self) -> int | None:
        if self._free:
            return self._free.pop()
        if (row := next(self._unused, None)) is not None:
            return row
        return self._rows.evict(self._readers)

    def request_finished(
        self, transfer: int, request: Request
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold no blocks: saves are independent."""
        return False, None

    def build_metadata(self) -> Jobs | None:
        return self._jobs.take()

    def update(self, report: KVReport) -> None:
        """Make rows available once their save has ended."""
        for transfer in (*report.finished, *report.failed):
            failed = transfer in report.failed
            priority, saved = self._saving.pop(transfer, (0, []))
            for key, row in reversed(saved):
                self._keys_being_saved.discard(key)
                if failed:
                    self._free.append(row)
                else:
                    self._rows.add(key, row, priority)
            for row in self._loading.pop(transfer, []):
                self._readers[row] -= 1
                if not self._readers[row]:
                    del self._readers[row]

    def close(self) -> None:
        """Nothing to release."""


class CpuOffloadWorker(ThreadedWorker):
    options: type[CpuOffloadOptions] = CpuOffloadOptions

    def __init__(self, setup: KVConnectorSetup) -> None:
        super().__init__(setup)
        self._rows = BlockRows.of(setup, self.options)
        self._pinned = False

    def copier(self, kv_caches: Sequence[torch.Tensor]) -> BlockCopier:
        """Return a copier of blocks as they are, or in fewer bits."""
        stored = self._rows.stored
        return BlockCopier(kv_caches) if stored == "auto" else ReducingCopier(kv_caches, stored)

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        size = self._rows.num_rows * self._rows.row_bytes
        try:
            self._pool = torch.empty(self._rows.num_rows, self._rows.row_bytes, dtype=torch.uint8)
            if kv_caches[0].device.type == "cuda":
                # Registered in place: torch's own pinned memory is rounded up, at worst to twice
                # the size.
                runtime = cuda.cudart()
                cuda.check_error(int(runtime.cudaHostRegister(self._pool.data_ptr(), size, 0)))
                self._pinned = True
        except RuntimeError as error:
            raise OutOfMemory(
                f"kv_connector_extra_config.kv_offloading_size: {size / (1 << 30):.1f} GiB of host "
                f"memory are not to be had, ask for less ({error})",
                param="kv_transfer_config",
            ) from error
        super().bind(kv_caches)

    def load(self, job: Job, copier: BlockCopier, after: Any) -> Sequence[int]:
        """Load the blocks that have a row; others were evicted."""
        count = len(job.places)
        copier.write(job.block_ids[:count], self._pool, job.places, after)
        return job.block_ids[count:]

    def save(self, job: Job, copier: BlockCopier) -> Sequence[int]:
        copier.read(job.block_ids, self._pool, job.places)
        return ()

    def finish(self) -> None:
        if self._pinned:
            cuda.cudart().cudaHostUnregister(self._pool.data_ptr())
            self._pinned = False
        self._pool = torch.empty(0)
