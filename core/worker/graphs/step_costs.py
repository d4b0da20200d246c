"""What recorded steps cost with drafts and without, measured in spare time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from ...parts.speculation import StepCost
from .decode_graphs import DecodeGraphs
from .draft_graphs import DraftGraphs
from .pass_graphs import PassGraphs

RUNS = 3
"""Runs of a step; the fastest counts, as the first may find a device that sleeps."""


class StepCosts:
    """Measures one step after the other, without requests, and what a speculator's model does
    after it. Texts are short: of long ones, all widths read as much more."""

    def __init__(
        self,
        decode: DecodeGraphs,
        drafts: Sequence[DraftGraphs],
        passes: PassGraphs | None,
        device: torch.device,
    ) -> None:
        """drafts: of each number of drafts, all recorded."""
        self._decode, self._passes, self._device = decode, passes, device
        self._drafts = {each.width - 1: each for each in drafts}
        self._left = deque(
            (rows, number)
            for rows in sorted({rows for each in drafts for rows in each.row_counts})
            for number in (0, *self._drafts)
            if not number or rows in self._drafts[number].row_counts
        )
        """Rows, and drafts of each."""

    def measure_next(self) -> StepCost | None:
        """Return the cost of one more step; None: nothing is left. Waits for the device."""
        while self._left:
            rows, number = self._left.popleft()
            if number or rows in self._decode.row_counts:
                seconds = min(self._seconds(rows, number) for _ in range(RUNS))
                return StepCost(rows, number, seconds)
        return None

    def _seconds(self, rows: int, number: int) -> float:
        self._wait()
        began = time.perf_counter()
        if number:
            self._drafts[number].run_scratch(rows)
        else:
            self._decode.run_scratch(rows)
        if self._passes is not None:
            self._passes.run_scratch(rows, 1 + number)
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
