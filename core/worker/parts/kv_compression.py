"""KV compression: compactions, run and timed before a plan's rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...cache.level_options import LevelFormat
from ...errors import ConfigError
from ...nn.context import QueryPlaces
from ...parts.kv_compression import NAME, CompactionPlan, CompactionResult
from ...protocols.attention import AttentionBackend, PagedBackend
from ...protocols.latent_attention import LatentAttentionBackend
from ...step import NOTHING_IN_PROCESS, InProcess, PartPlan, SlotStart, StepPlan
from ..batch import PersistentBatch, StepInputs
from ..launched_step import LaunchedStep
from ..selection import CacheLayer
from .compacted_layers import compacted_layers
from .compaction import Compactor, load_compressor
from .level_moves import LevelMover, level_formats
from .part import PartNeeds, PartSite, PartStart, Report, StartContext, WorkerPart
from .query_ring import QueryRing

OPERATIONS = frozenset({"decode_inputs.dropped", "step_inputs.dropped"})
"""Features for compacted caches."""


class KVCompressionStart(PartStart):
    option = "kv_compression"

    def __init__(self, start: StartContext, drafting: Sequence[CacheLayer] = ()) -> None:
        """drafting: layers of a speculator's model, which share blocks with the served model's."""
        self._start = start
        if start.config.kv_compression is None:
            self.option = "kv_compression_levels"
        max_model_len = start.model_config.max_model_len
        if not start.layers and start.ranks.pipeline.size == 1:
            raise ConfigError(
                f"{self.option}: no layer of this model keeps something of each token, so that "
                "there is nothing to compact",
                param=self.option,
            )
        self._compressor = load_compressor(
            start.plugins, start.config, start.layers, start.kv_dtype, max_model_len, drafting
        )
        self._layers = (
            *compacted_layers(start.layers, max_model_len),
            *compacted_layers(drafting, max_model_len, drafts=True),
        )
        self._formats: tuple[LevelFormat, ...] = ()
        if levels := start.config.cache_levels:
            self._formats = level_formats(
                (*start.layers, *drafting), levels, start.config.block_size, start.kv_dtype,
                max_model_len, start.ranks, start.device,
            )  # fmt: skip
        self.needs = PartNeeds(
            operations=OPERATIONS,
            refuses=level_refusal if levels else backend_refusal,
            batch={"compacts": True, "levels": self._formats},
        )

    def make(self, site: PartSite) -> KVCompression:
        start, config, ring = self._start, self._start.config, None
        described = "moving to levels"
        if config.kv_compression is not None:
            described = start.plugins["kv_compressor"].described(config.kv_compression)
        dtype = start.model_config.dtype
        compressor = self._compressor
        if compressor is not None and compressor.num_queries:
            ring = QueryRing(
                self._layers, config.max_num_seqs, compressor.num_queries, start.device,
                dtype, site.batch.num_drafts,
            )  # fmt: skip
        mover: Compactor | LevelMover
        if self._formats:
            mover = LevelMover(
                compressor, described, self._layers, self._formats, config.block_size,
                start.operations, dtype, ring,
            )  # fmt: skip
        else:
            assert compressor is not None, "without levels, a compressor is named"
            mover = Compactor(
                compressor, described, self._layers, site.batch.table, config.block_size,
                start.operations, dtype, ring,
            )  # fmt: skip
        return KVCompression(mover, ring, site.batch, divided=start.ranks.size > 1)

    def complete(self, num_blocks: int) -> Mapping[str, Any]:
        return {"level_formats": self._formats}


def backend_refusal(backend: type[PagedBackend]) -> str | None:
    """Return why an attention backend does not fit the part, or None."""
    serves = False
    if issubclass(backend, AttentionBackend):
        serves = backend.compacted_cache and backend.standard_cache
    elif issubclass(backend, LatentAttentionBackend):
        serves = backend.compacted_cache
    return None if serves else "it reads no compacted cache (kv_compression)"


def level_refusal(backend: type[PagedBackend]) -> str | None:
    """Return why an attention backend does not fit the part with levels, or None."""
    serves = False
    if issubclass(backend, AttentionBackend | LatentAttentionBackend):
        serves = backend.leveled_cache
    if not serves:
        return "it reads no tokens in fewer bits beside others (kv_compression_levels)"
    return backend_refusal(backend)


class KVCompression(WorkerPart):
    """Runs compactions, and keeps failures for their rows."""

    name = NAME

    def __init__(
        self,
        mover: Compactor | LevelMover,
        ring: QueryRing | None,
        batch: PersistentBatch,
        *,
        divided: bool,
    ) -> None:
        """ring: if the compressor needs queries. divided: whether other ranks have parts of
        caches.
        """
        self._mover = mover
        self._ring = ring
        self._batch = batch
        self._divided = divided
        self._failures: dict[int, str] = {}
        """Slot → failure of its compaction, until its next row."""
        self._seconds: list[Callable[[], float]] = []
        """Timers of unreported compactions."""

    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        if self._ring is not None:
            self._ring.start(start)

    def release(self, slot: int) -> None:
        self._failures.pop(slot, None)

    def move(self, part: PartPlan, plan: StepPlan) -> None:
        """Queue the compactions.

        Raises RuntimeError if one fails and other ranks share the cache.
        """
        assert isinstance(part, CompactionPlan)
        self._seconds.append(self._timed(lambda: self._run(part)))

    def _run(self, part: CompactionPlan) -> None:
        if isinstance(self._mover, LevelMover):
            failures = self._mover.run(part.moves)
        else:
            failures = self._mover.run(part.compactions)
        if failures and self._divided:
            # It may have failed on this rank alone, whose results are not those that are served.
            raise RuntimeError(next(iter(failures.values())))
        self._failures |= failures
        table = self._batch.table
        self._batch.send_writes(table.compacted(part.compactions))
        self._batch.send_writes(table.leveled(part.moves))

    def context(self, inputs: StepInputs) -> QueryPlaces | None:
        return None if self._ring is None else self._ring.places(inputs)

    def after(self, part: PartPlan | None, step: LaunchedStep) -> Report | None:
        """Report compactions' time, and fail rows with useless caches."""
        if self._failures:
            for row, slot in enumerate(step.plan.slots):
                if slot in self._failures:
                    step.failed[row] = self._failures.pop(slot)
        if not self._seconds:
            return None
        times, self._seconds = self._seconds, []
        return lambda: CompactionResult(sum(seconds() for seconds in times))

    def warm_up(self) -> None:
        if isinstance(self._mover, LevelMover):
            self._mover.warm_up(self._batch.scratch_slot)
        else:
            self._mover.warm_up()

    def _timed(self, work: Callable[[], None]) -> Callable[[], float]:
        """Queue work; return a function for its seconds, once done."""
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
