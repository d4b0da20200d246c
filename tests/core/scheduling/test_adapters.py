"""Adapters in any traffic: each row computes with its own, and none waits longer than is said."""

from __future__ import annotations

from typing import Any

import pytest
from test_compression_state_machine import NIGHTLY_STEPS, run_machine
from test_scheduler_state_machine import ConnectorMachine, PriorityMachine, ReplayingWorker

from jackfield.core.parts.adapters import NAME, AdapterRoom, AdapterUse
from jackfield.core.request import Request
from jackfield.core.step import StepPlan

MAX_RUNNING, LARGEST, MAX_WAIT = 2, 3, 9
ROOM = AdapterRoom(num_units=MAX_RUNNING * LARGEST, num_places=MAX_RUNNING * LARGEST)
SETTINGS = ROOM, MAX_RUNNING, MAX_WAIT


def units_of(number: int) -> int:
    return 1 + number % LARGEST


def use_adapter(request: Request, number: int, first: int = 0) -> None:
    request.parts[NAME] = AdapterUse(number, units_of(number), first)
    if first:
        request.late_extra = (first, f"digest {number}")
    else:
        request.cache_extra = (f"digest {number}",)


class AdapterWorker(ReplayingWorker):
    """Also keeps which adapter each unit of rank rows has."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.units: dict[int, int] = {}
        self.places: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.uses: dict[str, AdapterUse] = {}
        """Request → its adapter."""
        self.by_slot: dict[int, AdapterUse] = {}
        self.place_of: dict[int, int] = {}
        self.num_loads = self.num_rows = 0

    def run(self, plan: StepPlan, *args: Any, **more: Any) -> Any:
        part = plan.parts.get(NAME)
        for load in () if part is None else part.loads:
            assert 0 <= load.place < ROOM.num_places and len(set(load.units)) == len(load.units)
            assert all(0 <= unit < ROOM.num_units for unit in load.units)
            self.places[load.place] = load.number, load.units
            self.units.update(dict.fromkeys(load.units, load.number))
            self.num_loads += 1
        for start in plan.starts:
            self.by_slot.pop(start.slot, None)
            sent = start.parts.get(NAME)
            use = self.uses.get(start.request_id)
            assert (sent is None) == (use is None)
            if use is not None:
                assert sent.first_position == use.first_position
                self.by_slot[start.slot], self.place_of[start.slot] = use, sent.place
        for slot in plan.slots:
            if (use := self.by_slot.get(slot)) is not None:
                number, units = self.places[self.place_of[slot]]
                assert number == use.number, "another's adapter"
                assert len(units) == use.units
                assert all(self.units[unit] == number for unit in units), "another's rank rows"
                self.num_rows += 1
        used = {use.number for slot in plan.slots if (use := self.by_slot.get(slot)) is not None}
        assert len(used) <= MAX_RUNNING
        return super().run(plan, *args, **more)

    def whose(self, slot: int, position: int) -> Any:
        use = self.by_slot.get(slot)
        if use is None:
            return self.salts[slot]
        salt, number = self.salts[slot]
        return (salt, number) if position >= use.first_position else salt

    def forget(self, slots: set[int]) -> None:
        """Slots, and what a failed step was to load, are rubbish."""
        super().forget(slots)
        self.by_slot.clear()


class AdapterMachine(PriorityMachine):
    """Some requests without an adapter, the others with one of seven, some from a position on."""

    worker_class = AdapterWorker
    adapters = SETTINGS
    num_adapters = 7
    worker: AdapterWorker

    def prepare(self, request: Request) -> Any:
        if request.leader is not None:
            if (use := request.leader.parts.get(NAME)) is not None:
                use_adapter(request, use.number, use.first_position)
                self.worker.uses[request.request_id] = use
                return request.cache_salt, use.number
            return request.cache_salt
        choice = hash((len(request.prompt_token_ids), request.max_tokens, len(self.all)))
        number = choice % (self.num_adapters + 2)
        if number >= self.num_adapters:
            return request.cache_salt
        first = choice // 7 % request.num_prompt_tokens if choice % 3 == 0 else 0
        use_adapter(request, number, first)
        self.worker.uses[request.request_id] = request.parts[NAME]
        return request.cache_salt, number

    def fail_step(self, behind_ends_well: bool) -> None:
        loaded = {
            load.place
            for plan, _ in self.flying
            if (part := plan.parts.get(NAME)) is not None
            for load in part.loads
        }
        super().fail_step(behind_ends_well)
        for place in loaded:
            self.worker.places.pop(place, None)


class AdapterConnectorMachine(ConnectorMachine):
    """Beside a KV connector, whose keys tell adapters apart."""

    worker_class = AdapterWorker
    adapters = SETTINGS
    num_adapters = 4
    prepare = AdapterMachine.prepare


class AdapterStagesMachine(AdapterMachine):
    num_stages, most_in_flight = 2, 3


class AdapterDraftMachine(AdapterMachine):
    num_drafts = 3


MACHINES = (AdapterMachine, AdapterConnectorMachine, AdapterStagesMachine, AdapterDraftMachine)


@pytest.mark.parametrize("machine", MACHINES)
def test_random_steps(machine: type[PriorityMachine]) -> None:
    loads = rows = 0

    class Counting(machine):  # type: ignore[misc, valid-type]
        def teardown(self) -> None:
            nonlocal loads, rows
            super().teardown()
            loads += self.worker.num_loads
            rows += self.worker.num_rows

    run_machine(Counting, 1500)
    assert loads and rows > loads, "the machine uses no adapters"


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_many_random_steps(machine: type[PriorityMachine]) -> None:
    run_machine(machine, NIGHTLY_STEPS)
