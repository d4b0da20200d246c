"""Adapters: which are resident, and which each slot uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..step import PartPlan

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..request import Request

NAME = "adapters"
MAX_LOADS = 4
"""Adapters that are read at once, each on a thread of a rank: hashing, checking and packing one
takes longer than to read it. Those loaded by name are in host memory beside `max_cpu_loras`."""
RANK_UNIT = 8
"""Rank rows that are given together."""


def num_units(rank: int) -> int:
    """Return the units that an adapter of this rank takes."""
    return max(1, -(-rank // RANK_UNIT))


class AdapterRoom(NamedTuple):
    """What a device has for adapters."""

    num_units: int
    """Units of rank rows, numbered from 0."""
    num_places: int
    """Numbered from 0; as many as units, of which each adapter takes at least one."""


def adapter_room(config: EngineConfig) -> AdapterRoom:
    """Return the room of an engine's devices: `max_loras` adapters of the largest rank."""
    num = config.max_loras * num_units(config.max_lora_rank)
    return AdapterRoom(num_units=num, num_places=num)


class AdapterUse(msgspec.Struct, frozen=True, gc=False):
    """The adapter of a request (`Request.parts`); `Request.cache_extra` has its digest."""

    number: int
    """Of one load of one content; never used again."""
    units: int
    """Of rank rows that it takes on the device."""
    first_position: int = 0
    """Position from which it acts."""
    name: str = ""
    """As requests call it."""


def adapter_name(request: Request) -> str | None:
    """Return the name of the adapter that computes all of a request; None: none does."""
    use = request.parts.get(NAME)
    return use.name if isinstance(use, AdapterUse) and not use.first_position else None


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
