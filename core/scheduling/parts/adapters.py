"""Adapters: which are in the device's memory, and whose requests may run."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from ...cache.kv_manager import PrefixHits
from ...parts.adapters import NAME, AdapterLoad, AdapterPlan, AdapterRoom, AdapterStart, AdapterUse
from ...request import Request
from ...step import StepPlan, StepResult
from ..plan_builder import PlanBuilder
from .part import PartServices, Readiness, SchedulerPart


@dataclass(eq=False, slots=True)
class Resident:
    """An adapter in the device's memory."""

    number: int
    place: int
    units: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Starving:
    """An adapter that has waited too long, and gets the next room."""

    number: int
    units: int
    victims: frozenset[int]
    """Adapters whose requests do not begin meanwhile."""


class _Wait(NamedTuple):
    """Since when an adapter finds no room for its requests."""

    since: int
    """Number of the plan."""
    units: int


class Adapters(SchedulerPart):
    """Keeps adapters resident, at most `max_loras` of them in running requests.

    An adapter that no running request uses stays until another one needs its rank rows, the least
    recently used one first. A request whose adapter gets no room is parked: requests behind it go
    first. That ends after `max_wait` plans: then requests of the resident adapters that will end
    first do not begin until it fits.

    Plans run in order on the device, so the rank rows of an adapter may be given to another one
    while a step in flight uses them.
    """

    name = NAME

    def __init__(
        self, services: PartServices, room: AdapterRoom, max_running: int, max_wait: int
    ) -> None:
        """max_running: adapters of running requests. max_wait: plans."""
        self._requests = services.requests
        self._room = room
        self._max_running = max_running
        self._largest = room.num_units // max_running
        """Units of an adapter of the largest rank."""
        self._max_wait = max_wait
        self._free_units = list(range(room.num_units))
        self._free_places = list(range(room.num_places))
        self._residents: OrderedDict[int, Resident] = OrderedDict()
        """Number → adapter, the least recently used one first."""
        self._pinned: dict[int, int] = {}
        """Number → units."""
        self._running: dict[int, int] = {}
        """Number → running requests that use it."""
        self._live: dict[int, int] = {}
        """Number → unfinished requests that use it."""
        self._parked: dict[int, dict[str, Request]] = {}
        """Number → requests that wait until their adapter gets room, by id."""
        self._waits: dict[int, _Wait] = {}
        """Adapter without room for its requests → since when, the longest waiting one first."""
        self._starving: Starving | None = None
        self._loads: list[AdapterLoad] = []
        """Of the plan that is being made."""
        self._loaded: dict[int, list[int]] = {}
        """Step in flight → adapters that it loads."""
        self._promised: set[int] = set()
        """Loaded with the last plan for a request that is to begin with this one."""
        self._overlaps = False
        """Whether other requests run, which a load would delay if rows of this plan needed it."""
        self._num_plans = 0
        self._counts = {"loads": 0, "evictions": 0, "turns_given": 0}
        self._idle: Callable[[int], None] | None = None

    @classmethod
    def maker(
        cls, room: AdapterRoom, max_running: int, max_wait: int
    ) -> Callable[[PartServices], Adapters]:
        """Return what makes the part."""
        return lambda services: cls(services, room, max_running, max_wait)

    # ------------------------------------------------------------ for the registry

    def watch_idle(self, callback: Callable[[int], None]) -> None:
        """Call `callback` with the number of an adapter whose last request has ended."""
        self._idle = callback

    def num_live(self, number: int) -> int:
        """Return the unfinished requests that use an adapter."""
        return self._live.get(number, 0)

    def num_running(self, number: int) -> int:
        """Return the running requests that use an adapter."""
        return self._running.get(number, 0)

    def is_resident(self, number: int) -> bool:
        """Return whether an adapter is in the device's memory, or on its way there."""
        return number in self._residents

    @property
    def num_residents(self) -> int:
        return len(self._residents)

    @property
    def num_parked(self) -> int:
        """Requests that wait for room."""
        return sum(map(len, self._parked.values()))

    @property
    def num_plans(self) -> int:
        """Plans so far: the clock of waiting."""
        return self._num_plans

    @property
    def max_wait(self) -> int:
        return self._max_wait

    def can_pin(self, number: int, units: int) -> bool:
        """Return whether the largest adapter still has room beside those that are pinned, with this
        one."""
        others = sum(self._pinned.values()) - self._pinned.get(number, 0)
        return others + units + self._largest <= self._room.num_units

    def pin(self, number: int, units: int) -> None:
        """Load an adapter with the next plan that has room, and keep it. Only if `can_pin`."""
        assert self.can_pin(number, units), f"no room beside adapter {number}"
        self._pinned[number] = units

    def unpin(self, number: int) -> None:
        """Let an adapter be evicted again."""
        self._pinned.pop(number, None)

    def forget(self, number: int) -> None:
        """Free the place of an adapter that no request uses, for good."""
        assert number not in self._live, f"adapter {number} has requests"
        self._pinned.pop(number, None)
        if number in self._residents:
            self._evict(number)

    # ------------------------------------------------------------ requests that wait

    def added(self, request: Request) -> None:
        """Count a request of an adapter."""
        if (use := _use(request)) is not None:
            self._live[use.number] = self._live.get(use.number, 0) + 1

    def readiness(self, request: Request, hits: PrefixHits, reserve: int) -> Readiness:
        """Load the request's adapter, or let it wait."""
        use = _use(request)
        if use is None:
            return Readiness.READY
        number, starving = use.number, self._starving
        if starving is not None and (
            number in starving.victims
            or (number != starving.number and number not in self._running)
        ):
            return self._park(request, use)
        if number not in self._running and not self._fits(number, use.units):
            return self._park(request, use)
        if number not in self._residents:
            self._load(number, use.units)
        if self._overlaps and number not in self._running and self._is_loading(number):
            self._promised.add(number)
            return Readiness.LATER
        return Readiness.READY

    def enter(self, request: Request, hits: PrefixHits) -> None:
        """Count a request that runs."""
        if (use := _use(request)) is None:
            return
        self._running[use.number] = self._running.get(use.number, 0) + 1
        if use.number not in self._parked:
            self._waits.pop(use.number, None)
        if self._starving is not None and self._starving.number == use.number:
            self._end_starving()

    def start_part(self, request: Request) -> AdapterStart | None:
        """Return the place of the request's adapter."""
        if (use := _use(request)) is None:
            return None
        return AdapterStart(self._residents[use.number].place, use.first_position)

    def leave(self, request: Request) -> None:
        """Count a request no longer that runs."""
        if (use := _use(request)) is None:
            return
        self._running[use.number] -= 1
        if not self._running[use.number]:
            del self._running[use.number]
            self._residents.move_to_end(use.number)

    def ended(self, request: Request) -> None:
        """Forget a request."""
        if (use := _use(request)) is None:
            return
        number = use.number
        if (parked := self._parked.get(number)) is not None:
            parked.pop(request.request_id, None)
            if not parked:
                del self._parked[number]
        if number not in self._parked and number in self._running:
            self._waits.pop(number, None)
        self._live[number] -= 1
        if self._live[number]:
            return
        del self._live[number]
        self._waits.pop(number, None)
        if self._starving is not None and self._starving.number == number:
            self._end_starving()
        if self._idle is not None:
            self._idle(number)

    # ------------------------------------------------------------ plans

    def begin_plan(self, builder: PlanBuilder) -> None:
        """Let parked requests try again whose adapters have room now, and load pinned adapters."""
        self._overlaps = bool(len(self._requests.running))
        if self._waits:
            self._unpark_running()
            self._find_starving()
            self._unpark()
        for number, units in self._pinned.items():
            if number not in self._residents and self._has_units(number, units):
                self._load(number, units)

    def needs_plan(self) -> bool:
        """Loads go out also without rows."""
        return bool(self._loads)

    def plan_part(self, step: int, builder: PlanBuilder) -> AdapterPlan | None:
        """Return the loads of the plan."""
        self._num_plans += 1
        loads, self._loads = self._loads, []
        # A promise is kept by the next plan, or is void.
        self._promised.intersection_update([load.number for load in loads])
        if not loads:
            return None
        self._loaded[step] = [load.number for load in loads]
        self._counts["loads"] += len(loads)
        return AdapterPlan(tuple(loads))

    def begin_result(self, plan: StepPlan, result: StepResult) -> None:
        """Note that what a plan loads is there."""
        if self._loaded:
            self._loaded.pop(plan.step, None)

    def step_failed(self, dropped: object) -> None:
        """Free the places of what steps in flight were to load; no request runs."""
        for numbers in self._loaded.values():
            for number in numbers:
                if number in self._residents:
                    self._evict(number)
        self._loaded.clear()

    def abandon(self) -> None:
        """Nothing is resident any more."""
        self._loaded.clear()
        for number in list(self._residents):
            self._evict(number)

    # ------------------------------------------------------------ room

    def _fits(self, number: int, units: int, without: Collection[int] = ()) -> bool:
        """Return whether an adapter may be used by running requests besides those that are, except
        `without`."""
        used = (self._running.keys() | self._promised) - {number}
        used -= set(without)
        if len(used) >= self._max_running:
            return False
        return self._has_units(number, units, without)

    def _has_units(self, number: int, units: int, without: Collection[int] = ()) -> bool:
        if number in self._residents:
            return True
        free = len(self._free_units)
        if free >= units:
            return True
        for other, resident in self._residents.items():
            if self._may_evict(other) or (other in without and other not in self._pinned):
                free += len(resident.units)
                if free >= units:
                    return True
        return False

    def _may_evict(self, number: int) -> bool:
        return not (number in self._running or number in self._promised or number in self._pinned)

    def _is_loading(self, number: int) -> bool:
        """Return whether the plan that is being made loads an adapter."""
        return any(load.number == number for load in self._loads)

    def _load(self, number: int, units: int) -> None:
        """Give an adapter a place, for which there is room."""
        for other in list(self._residents):
            if len(self._free_units) >= units:
                break
            if self._may_evict(other):
                self._evict(other)
                self._counts["evictions"] += 1
        place = heapq.heappop(self._free_places)
        taken = tuple(heapq.heappop(self._free_units) for _ in range(units))
        self._residents[number] = Resident(number, place, taken)
        self._loads.append(AdapterLoad(number, place, taken))

    def _evict(self, number: int) -> None:
        resident = self._residents.pop(number)
        heapq.heappush(self._free_places, resident.place)
        for unit in resident.units:
            heapq.heappush(self._free_units, unit)
        self._promised.discard(number)
        self._loads = [load for load in self._loads if load.number != number]

    # ------------------------------------------------------------ waiting

    def _park(self, request: Request, use: AdapterUse) -> Readiness:
        self._waits.setdefault(use.number, _Wait(self._num_plans, use.units))
        self._parked.setdefault(use.number, {})[request.request_id] = request
        return Readiness.LOADING

    def _unpark_running(self) -> None:
        """Return requests to the queue whose adapters other requests use."""
        victims = frozenset() if self._starving is None else self._starving.victims
        for number in (self._running.keys() & self._parked.keys()) - victims:
            self._wait_again(number)
            del self._waits[number]

    def _unpark(self) -> None:
        """Return requests to the queue whose adapters have room now, the first in policy order
        first."""
        starving = self._starving
        if starving is not None:
            if starving.number in self._parked and self._fits(starving.number, starving.units):
                self._wait_again(starving.number)
            return
        spare = self._max_running - len(self._running)
        if spare <= 0 or not self._parked:
            return
        for number in heapq.nsmallest(spare, self._parked, key=self._order):
            if not self._fits(number, self._waits[number].units):
                return
            self._wait_again(number)

    def _order(self, number: int) -> tuple[Any, ...]:
        """Return the place in policy order of an adapter's first parked request."""
        return min(request.order for request in self._parked[number].values())

    def _wait_again(self, number: int) -> None:
        for request in self._parked.pop(number).values():
            self._requests.wait_again(request)

    def _find_starving(self) -> None:
        """Give the adapter whose requests have waited longest the next room, if that is too
        long."""
        if self._starving is not None or not self._waits:
            return
        number, (since, units) = next(iter(self._waits.items()))
        if self._num_plans - since < self._max_wait:
            return
        self._counts["turns_given"] += 1
        lefts: dict[int, int] = {}
        for request in self._requests.running:
            if (use := _use(request)) is not None:
                left = request.max_total_tokens - request.num_known_tokens
                lefts[use.number] = max(left, lefts.get(use.number, 0))
        victims: set[int] = set()
        for other in sorted(lefts, key=lambda n: lefts[n]):
            if self._fits(number, units, victims):
                break
            victims.add(other)
        self._starving = Starving(number, units, frozenset(victims))

    def _end_starving(self) -> None:
        """Let requests of the victims begin again."""
        self._starving = None

    # ------------------------------------------------------------ looking in

    @property
    def counts(self) -> dict[str, Any]:
        """Loads to the device, evictions from it, and turns given to adapters that waited too
        long."""
        return self._counts

    def awaited(self) -> Iterator[Request]:
        """Return the parked requests."""
        return chain.from_iterable(parked.values() for parked in self._parked.values())

    def held_blocks(self, running: list[Request]) -> tuple[int, ...]:
        """Return (): adapters hold no blocks. Raises AssertionError as the contract says."""
        uses = [use for request in running if (use := _use(request)) is not None]
        counts: dict[int, int] = {}
        for use in uses:
            counts[use.number] = counts.get(use.number, 0) + 1
            assert use.number in self._residents, f"adapter {use.number} runs without a place"
            assert len(self._residents[use.number].units) == use.units, "units are miscounted"
        assert counts == self._running, f"{self._running} run, not {counts}"
        assert len(counts) <= self._max_running, f"{len(counts)} adapters run"
        units = [*self._free_units, *(u for r in self._residents.values() for u in r.units)]
        assert sorted(units) == list(range(self._room.num_units)), "units leaked or given twice"
        places = [*self._free_places, *(r.place for r in self._residents.values())]
        assert sorted(places) == list(range(self._room.num_places)), "places leaked"
        assert all(self._parked.values()), "an adapter without requests is parked"
        live: dict[int, int] = {}
        for request in self._requests.by_id.values():
            if (use := _use(request)) is not None:
                live[use.number] = live.get(use.number, 0) + 1
        assert live == self._live, f"{self._live} live, not {live}"
        assert self._parked.keys() <= self._waits.keys() <= live.keys(), "waits of no request"
        return ()


def _use(request: Request) -> AdapterUse | None:
    use: AdapterUse | None = request.parts.get(NAME)
    return use
