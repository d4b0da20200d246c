"""Adapters: which are resident, and which each slot uses."""

from __future__ import annotations

import msgspec

from ..step import PartPlan

NAME = "adapters"
RANK_UNIT = 8
"""Rank rows that are given together."""


def num_units(rank: int) -> int:
    """Return the units that an adapter of this rank takes."""
    return max(1, -(-rank // RANK_UNIT))


class AdapterUse(msgspec.Struct, frozen=True, gc=False):
    """The adapter of a request (`Request.parts`); `Request.cache_extra` has its digest."""

    number: int
    """Of one load of one content; never used again."""
    units: int
    """Of rank rows that it takes on the device."""
    first_position: int = 0
    """Position from which it acts."""


class AdapterStart(msgspec.Struct, frozen=True, gc=False):
    """The adapter of a request that takes a slot."""

    place: int
    first_position: int = 0


class AdapterLoad(msgspec.Struct, frozen=True):
    """An adapter becomes resident, in place of what was there. Before any row of the plan."""

    number: int
    place: int
    units: tuple[int, ...]
    """Numbers of units of rank rows, in the order of its ranks."""


class AdapterPlan(PartPlan, frozen=True):
    """What becomes resident with a plan."""

    loads: tuple[AdapterLoad, ...]


class AdapterInfo(msgspec.Struct, frozen=True):
    """What is known of an adapter that was read (`ReadAdapter`)."""

    digest: str
    rank: int
    """The largest of its ranks; 0: none."""
    nbytes: int
    """In host memory, on this rank."""
    special: bool
    """Whether steps with it are launched, not replayed."""
    invocation_tokens: tuple[int, ...] = ()
    base_model: str = ""
    notes: tuple[str, ...] = ()
