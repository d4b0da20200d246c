"""KV compression: compactions of a plan, run and timed before its rows."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ...nn.context import QueryPlaces
from ...parts.kv_compression import NAME, Compaction, CompactionPlan, CompactionResult
from ...protocols.attention import AttentionBackend, PagedBackend
from ...step import NOTHING_IN_PROCESS, InProcess, PartPlan, SlotStart, StepPlan
from ..batch import PersistentBatch, StepInputs
from ..launched_step import LaunchedStep
from .compaction import Compactor, load_compressor
from .part import PartNeeds, PartSite, PartStart, Report, StartContext, WorkerPart
from .query_ring import QueryRing

OPERATIONS = frozenset({"decode_inputs.dropped", "step_inputs.dropped"})
"""What rows with compacted caches need."""


class KVCompressionStart(PartStart):
    """Loads the configured KV compressor."""

    option = "kv_compression"

    def __init__(self, start: StartContext) -> None:
        self._start = start
        self._compressor = load_compressor(
            start.plugins, start.config, start.key_values, start.kv_dtype
        )
        self.needs = PartNeeds(
            operations=OPERATIONS, refuses=backend_refusal, batch={"compacts": True}
        )

    def make(self, site: PartSite) -> KVCompression:
        """Keep the queries that the compressor needs."""
        start, config, ring = self._start, self._start.config, None
        described = start.plugins["kv_compressor"].described(config.kv_compression or "")
        dtype = start.model_config.dtype
        if self._compressor.num_queries:
            ring = QueryRing(
                start.key_values, config.max_num_seqs, self._compressor.num_queries, start.device,
                dtype,
            )  # fmt: skip
        compactor = Compactor(
            self._compressor, described, start.key_values, site.batch.table, config.block_size,
            start.operations, dtype, ring,
        )  # fmt: skip
        return KVCompression(compactor, ring, site.batch, divided=start.ranks.size > 1)


def backend_refusal(backend: type[PagedBackend]) -> str | None:
    """Return why an attention backend does not serve with the part; None: it does."""
    if issubclass(backend, AttentionBackend):
        if not (backend.compacted_cache and backend.standard_cache):
            return "it reads no compacted cache (kv_compression)"
    return None


class KVCompression(WorkerPart):
    """Runs compactions, and keeps failures for the rows that they concern."""

    name = NAME

    def __init__(
        self,
        compactor: Compactor,
        ring: QueryRing | None,
        batch: PersistentBatch,
        *,
        divided: bool,
    ) -> None:
        """ring: for a compressor that needs queries. divided: whether other ranks compute parts of
        the model, with caches of their own."""
        self._compactor = compactor
        self._ring = ring
        self._batch = batch
        self._divided = divided
        self._failures: dict[int, str] = {}
        """Slot → why its compaction failed, until a step has its row."""
        self._seconds: list[Callable[[], float]] = []
        """Return the time that compactions took which no step has reported yet."""

    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        """Forget the queries of the request before."""
        if self._ring is not None:
            self._ring.start(start)

    def release(self, slot: int) -> None:
        """Forget a failure."""
        self._failures.pop(slot, None)

    def move(self, part: PartPlan, plan: StepPlan) -> None:
        """Queue the plan's compactions.

        Raises RuntimeError if one fails and other ranks have a part of its cache.
        """
        assert isinstance(part, CompactionPlan)
        self._seconds.append(self._timed(lambda: self._run(part.compactions)))

    def _run(self, compactions: tuple[Compaction, ...]) -> None:
        failures = self._compactor.run(compactions)
        if failures and self._divided:
            # It may have failed on this rank alone, whose results are not those that are served.
            raise RuntimeError(next(iter(failures.values())))
        self._failures |= failures
        self._batch.send_writes(self._batch.table.compacted(compactions))

    def context(self, inputs: StepInputs) -> QueryPlaces | None:
        """Return where the step's queries are kept."""
        return None if self._ring is None else self._ring.places(inputs)

    def after(self, part: PartPlan | None, step: LaunchedStep) -> Report | None:
        """Report the time of the compactions before a step, and fail those of its rows whose cache
        holds nothing of use."""
        if self._failures:
            for row, slot in enumerate(step.plan.slots):
                if slot in self._failures:
                    step.failed[row] = self._failures.pop(slot)
        if not self._seconds:
            return None
        times, self._seconds = self._seconds, []
        return lambda: CompactionResult(sum(seconds() for seconds in times))

    def warm_up(self) -> None:
        """Run every launch that compactions need."""
        self._compactor.warm_up()

    def _timed(self, work: Callable[[], None]) -> Callable[[], float]:
        """Queue work; return a function that gives its seconds once the device has done it."""
        if self._batch.device.type != "cuda":
            began = time.perf_counter()
            work()
            seconds = time.perf_counter() - began
            return lambda: seconds
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        return lambda: first.elapsed_time(last) / 1e3
