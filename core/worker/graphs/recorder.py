"""Records CUDA graphs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable

import torch

from ...parallel.ranks import ONE_RANK, Ranks

logger = logging.getLogger("jackfield.worker")

WORTH_RECORDING = 4.0
"""Lost steps from which a graph is recorded in traffic: recording takes a few steps' time."""

Replay = Callable[[], object]
Recorder = Callable[[Callable[[], None]], Replay]
"""Records a function's enqueued work; returns a function that repeats it."""


class NotRecorded(RuntimeError):
    """Work could not be recorded on some rank, and so counts as not recorded on all."""


class Losses:
    """What steps lose for want of their own graphs, so that a busy server records those, too."""

    def __init__(self) -> None:
        self._lost: dict[Hashable, float] = {}

    def is_due(self, graph: Hashable, lost: float) -> bool:
        """Count a loss, in steps' time; return whether to record the graph now: True once."""
        lost += self._lost.get(graph, 0.0)
        is_due = lost >= WORTH_RECORDING
        self._lost[graph] = -math.inf if is_due else lost
        return is_due


class CountedRecorder:
    """Counts recordings and those that failed, and logs the first of these."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self.num_recorded = self.num_failures = 0

    def __call__(self, function: Callable[[], None]) -> Replay:
        """Record `function`. Raises RuntimeError."""
        try:
            replay = self._record(function)
        except RuntimeError as error:
            if not self.num_failures:
                logger.warning(
                    "recording a step as a CUDA graph failed: %s; a step without a graph is "
                    "launched kernel by kernel (further failures are only counted, in "
                    "jackfield:graph_recording_failures_total)", error,
                )  # fmt: skip
            self.num_failures += 1
            raise
        self.num_recorded += 1
        return replay


class CudaRecorder:
    """Records CUDA graphs with a common memory pool; all ranks record the same."""

    def __init__(self, device: torch.device, ranks: Ranks = ONE_RANK) -> None:
        self._device, self._ranks = device, ranks
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Replay:
        """Record `function` without running kernels; other threads may use the device. Raises
        RuntimeError, or with several ranks NotRecorded on all.
        """
        if self._ranks.tensor.size == 1:
            return self._record(function)
        replay, failure = None, None
        try:
            replay = self._record(function)
        except RuntimeError as error:
            failure = error
        if not self._ranks.all(failure is None, self._device) or replay is None:
            raise NotRecorded(str(failure or "another rank could not record it")) from failure
        return replay

    def _record(self, function: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        replay: Replay = graph.replay
        return replay
