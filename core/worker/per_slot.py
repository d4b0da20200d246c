"""What the worker remembers of the requests in its slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ..step import NOTHING_IN_PROCESS, InProcess, SlotStart, StepPlan


class PerSlot(ABC):
    """Something that the worker remembers of slots: sampling parameters, grammars, kept states."""

    @abstractmethod
    def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
        """Remember the request that takes a slot, newly admitted or resumed, and nothing of the one
        before."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """Forget the request of a slot, which ended or was preempted. Safe to call twice, and for a
        slot that was never taken."""

    def upload(self) -> None:  # noqa: B027
        """Send to the device what changed; called once per step, before its tokens are sampled."""


def update_slots(
    tables: Sequence[PerSlot], plan: StepPlan, in_process: InProcess = NOTHING_IN_PROCESS
) -> None:
    """Release the slots that the plan releases, then start those that it starts, in all tables."""
    for slot in plan.released:
        for table in tables:
            table.release(slot)
    for start in plan.starts:
        for table in tables:
            table.start(start, in_process)
