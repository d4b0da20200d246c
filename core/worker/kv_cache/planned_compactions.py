"""The compactions of plans: run and timed before their rows, and failures kept for those rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch

from ...step import Compaction
from ..launched_step import LaunchedStep
from .compaction import Compactor


class PlannedCompactions:
    """Runs on the launch thread alone."""

    def __init__(self, compactor: Compactor, device: torch.device, *, divided: bool) -> None:
        """divided: whether other ranks compute parts of the model, with caches of their own."""
        self._compactor = compactor
        self._device = device
        self._divided = divided
        self._failures: dict[int, str] = {}
        """Slot → why its compaction failed, until a step has its row."""
        self._seconds: list[Callable[[], float]] = []
        """Return the time that compactions took which no step has reported yet."""

    def warm_up(self) -> None:
        """Run every launch that compactions need."""
        self._compactor.warm_up()

    def run(self, compactions: Sequence[Compaction], shorten_tables: Callable[[], None]) -> None:
        """Queue a plan's compactions. shorten_tables: queues what they change in block tables.

        Raises RuntimeError if one fails and other ranks have a part of its cache.
        """
        self._seconds.append(self._timed(lambda: self._run(compactions, shorten_tables)))

    def _run(self, compactions: Sequence[Compaction], shorten_tables: Callable[[], None]) -> None:
        failures = self._compactor.run(compactions)
        if failures and self._divided:
            # It may have failed on this rank alone, whose results are not those that are served.
            raise RuntimeError(next(iter(failures.values())))
        self._failures |= failures
        shorten_tables()

    def report(self, step: LaunchedStep) -> None:
        """Let a step report the time of the compactions before it, and fail those of its rows whose
        cache holds nothing of use."""
        if self._seconds:
            times, self._seconds = self._seconds, []
            step.compaction_seconds = lambda: sum(seconds() for seconds in times)
        if self._failures:
            for row, slot in enumerate(step.plan.slots):
                if slot in self._failures:
                    step.failed[row] = self._failures.pop(slot)

    def forget(self, slots: Iterable[int]) -> None:
        """Forget the failures of slots that are free."""
        for slot in slots if self._failures else ():
            self._failures.pop(slot, None)

    def _timed(self, work: Callable[[], None]) -> Callable[[], float]:
        """Queue work; return a function that gives its seconds once the device has done it."""
        if self._device.type != "cuda":
            began = time.perf_counter()
            work()
            seconds = time.perf_counter() - began
            return lambda: seconds
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        return lambda: first.elapsed_time(last) / 1e3
