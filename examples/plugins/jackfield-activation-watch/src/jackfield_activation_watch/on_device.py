"""The worker half: the largest activation of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from jackfield.core.types import InProcess, PartPlan, SlotStart, StepPlan
from jackfield.core.worker.parts.part import (
    PartNeeds,
    PartSite,
    PartStart,
    StartContext,
    WorkerPart,
)

from .part import NAME, WatchPlan, WatchResult


class PeaksStart(PartStart):
    """Says how much memory the part needs, then makes it."""

    option = f"parts.{NAME}"

    def __init__(self, start: StartContext) -> None:
        config = start.config
        self._device = start.device
        # Recorded steps are padded by as many rows at most.
        self._max_tokens = (config.max_num_batched_tokens or 0) + config.max_num_seqs
        self.needs = PartNeeds(nbytes=4 * self._max_tokens)

    def make(self, site: PartSite) -> Peaks:
        return Peaks(torch.zeros(self._max_tokens, device=self._device))


class Peaks(WorkerPart):
    """Keeps the peak of each token of the step that was launched last."""

    name = NAME

    def __init__(self, peaks: torch.Tensor) -> None:
        self._peaks = peaks
        """[max_tokens] float32. Where it is never changes, so that a recorded step can write it."""
        self._limits: dict[int, float] = {}
        """Slot → its request's limit."""

    def start(self, start: SlotStart, in_process: InProcess | None = None) -> None:
        self.release(start.slot)
        if NAME in start.parts:
            self._limits[start.slot] = start.parts[NAME].limit

    def release(self, slot: int) -> None:
        self._limits.pop(slot, None)

    def computed(self, inputs: Any, hidden: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        states = hidden if isinstance(hidden, tuple) else (hidden,)
        peaks = torch.stack([state.abs().amax(1).float() for state in states]).amax(0)
        self._peaks[: len(peaks)].copy_(peaks)

    def sampled(self, plan: StepPlan, output: dict[str, torch.Tensor], rows: Sequence[int]) -> None:
        if NAME in plan.parts:
            # The next step writes the peaks again, maybe before these are on the host.
            output[NAME] = self._peaks[: plan.total_tokens].clone()

    def after(self, part: PartPlan | None, step: Any) -> Any:
        if not isinstance(part, WatchPlan):
            return None
        # By the time that the step is done, its slots may be other requests'.
        limits = {row: self._limits[step.plan.slots[row]] for row in part.rows}
        return lambda: _report(limits, step)


def _report(limits: dict[int, float], step: Any) -> WatchResult:
    """The report of a step that is done. limits: row → its limit"""
    over, end, num_watched = {}, 0, 0
    for row, count in enumerate(step.plan.num_tokens):
        begin, end = end, end + count
        if row in limits:
            num_watched += count
            peak = float(step.output[NAME][begin:end].max())
            if not peak <= limits[row]:  # It may be no number.
                over[row] = peak
    return WatchResult(num_watched, over)
