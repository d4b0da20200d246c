"""Layers that keep states of sequences: snapshots of states in plans."""

from __future__ import annotations

import msgspec

from ..step import PartPlan

NAME = "states"


class StateCopy(msgspec.Struct, frozen=True, gc=False):
    """A slot's state is copied from a snapshot, or to one."""

    slot: int
    snapshot: int


class StatePlan(PartPlan, frozen=True):
    """Snapshots that a plan reads and writes."""

    loads: tuple[StateCopy, ...] = ()
    """Snapshots that slots start from: before any row."""
    saves: tuple[StateCopy, ...] = ()
    """Snapshots of what the step's rows leave: after all rows."""
