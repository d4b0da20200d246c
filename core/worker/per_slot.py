"""Per-slot state of the worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ..step import NOTHING_IN_PROCESS, InProcess, SlotStart, StepPlan


class PerSlot(ABC):
    """Remembers something of each slot's request."""

    @abstractmethod
    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        """Replace a slot's request by a new or resumed one."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """Forget a slot's request. Safe to repeat, and for unused slots."""

    def upload(self) -> None:  # noqa: B027
        """Send changes to the device, once per step before sampling."""


def update_slots(
    tables: Sequence[PerSlot], plan: StepPlan, in_process: InProcess = NOTHING_IN_PROCESS
) -> None:
    """Release the plan's slots, then start its new ones, in all tables."""
    for slot in plan.released:
        for table in tables:
            table.release(slot)
    for start in plan.starts:
        for table in tables:
            table.start(start, in_process)
