"""Adapters in any traffic: each row computes with its own, and none waits longer than is said."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from scheduled import add, drain, make_request, make_scheduler, run
from test_compression_state_machine import NIGHTLY_STEPS, run_machine
from test_scheduler_state_machine import ConnectorMachine, PriorityMachine, ReplayingWorker

from jackfield.core.parts.adapters import NAME, AdapterRoom, AdapterUse
from jackfield.core.request import Request
from jackfield.core.scheduling.parts.adapters import Adapters
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import StepPlan

MAX_RUNNING, LARGEST, MAX_WAIT = 2, 3, 9
ROOM = AdapterRoom(num_units=MAX_RUNNING * LARGEST, num_places=MAX_RUNNING * LARGEST)
SETTINGS = ROOM, MAX_RUNNING, MAX_WAIT


def units_of(number: int) -> int:
    return 1 + number % LARGEST


def use_adapter(request: Request, number: int, first: int = 0) -> None:
    request.parts[NAME] = AdapterUse(number, units_of(number), first)
    if first:
        request.late_extra = ((first, f"digest {number}"),)
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


# ---------------------------------------------------------------- one thing at a time


def adapted(number: int, prompt_len: int = 10, first: int = 0, **more: Any) -> Request:
    request = make_request(prompt_len, **more)
    use_adapter(request, number, first)
    return request


def scheduler(max_running: int = MAX_RUNNING, max_wait: int = MAX_WAIT, **more: Any) -> Scheduler:
    room = AdapterRoom(max_running * LARGEST, max_running * LARGEST)
    return make_scheduler(adapters=(room, max_running, max_wait), **more)


def part_of(planner: Scheduler) -> Adapters:
    part = planner.part(Adapters)
    assert part is not None
    return part


def step(planner: Scheduler) -> tuple[list[int], list[str]]:
    """Run a step. Return which adapters it loads, and which requests begin with it."""
    plan = planner.schedule()
    assert plan is not None
    loads = plan.parts[NAME].loads if NAME in plan.parts else ()
    begun = [start.request_id for start in plan.starts]
    run(planner, plan)
    planner.check_invariants()
    return [load.number for load in loads], begun


def test_a_load_goes_out_with_the_plan_before_if_others_run() -> None:
    planner = scheduler()
    first, second = adapted(1), adapted(2)
    add(planner, first)
    assert step(planner) == ([1], [first.request_id])  # Nothing would be gained by waiting.
    add(planner, second)
    assert step(planner) == ([2], [])
    assert step(planner) == ([], [second.request_id])


def test_a_resident_adapter_is_not_loaded_again_and_the_oldest_goes() -> None:
    planner = scheduler()  # Six units: adapters of 2, 3, 1, 2, … units.
    for number in (1, 2, 3, 1, 4):
        add(planner, adapted(number, max_tokens=1))
        drain(planner)
    assert part_of(planner).counts == {"loads": 4, "evictions": 1, "turns_given": 0}
    # 4 takes the room of 2, which was not used since.
    assert [n for n in range(6) if part_of(planner).is_resident(n)] == [1, 3, 4]


def test_a_pinned_adapter_is_loaded_without_requests_and_stays() -> None:
    planner = scheduler()
    part = part_of(planner)
    assert not part.can_pin(1, LARGEST + 1)  # The largest would have no room.
    part.pin(1, 2)
    assert step(planner) == ([1], [])
    for number in range(2, 12):
        add(planner, adapted(number, max_tokens=1))
        drain(planner)
        assert part.is_resident(1)
    part.unpin(1)
    part.forget(1)
    assert not part.is_resident(1)
    planner.check_invariants()


def test_a_step_that_failed_has_loaded_nothing() -> None:
    planner = scheduler()
    add(planner, adapted(1))
    plan = planner.schedule()
    planner.fail_step(plan, "on purpose")
    planner.check_invariants()
    again = adapted(1)
    add(planner, again)
    assert step(planner) == ([1], [again.request_id])


def test_one_that_is_not_needed_any_more_is_reported() -> None:
    planner = scheduler()
    idle: list[int] = []
    part_of(planner).watch_idle(idle.append)
    one, two = adapted(1), adapted(1)
    add(planner, one, two)
    planner.schedule()
    planner.finish_request(one.request_id, "abort")
    assert not idle
    planner.finish_request(two.request_id, "abort")
    assert idle == [1]


@pytest.mark.parametrize("num_cold", [1, 3])
def test_a_cold_adapter_waits_no_longer_than_is_said(num_cold: int) -> None:
    """Two hot adapters never run out of requests, whose outputs have up to 12 tokens and end at
    different times."""
    planner = scheduler(max_wait=20, max_num_seqs=8)
    cold = [adapted(10 + n, max_tokens=4) for n in range(num_cold)]
    begun: dict[str, int] = {}
    numbers = count()
    for number in range(400):
        while planner.num_running + len(planner.requests.waiting) < 12:
            hot = next(numbers)
            add(planner, adapted(1 + hot % 2, max_tokens=3 + hot * 7 % 10))
        if number == 30:
            add(planner, *cold)
        for request_id in step(planner)[1]:
            begun[request_id] = number
    waits = [begun[request.request_id] - 30 for request in cold]
    # The wait, then the outputs of a victim that run, for each that waits as long; and for a
    # request of another hot adapter, whose turn it is after as long.
    assert waits[0] <= 20 + 12 + 4
    assert all(wait <= (n + 1) * (20 + 2 * 16) for n, wait in enumerate(waits)), waits
    # Without turns, it would wait for ever.
    assert part_of(planner).counts["turns_given"] >= num_cold


def test_requests_behind_one_that_waits_go_first() -> None:
    planner = scheduler(1)
    hot, cold, more, base = adapted(1), adapted(2), adapted(1), make_request()
    add(planner, hot, cold, more, base)
    assert step(planner)[1] == [hot.request_id, more.request_id, base.request_id]
    drain(planner)
    assert cold.finish_reason is not None and not part_of(planner).num_parked


def test_blocks_before_an_activation_are_those_of_the_base_model() -> None:
    planner = scheduler(block_size=4)
    prompt = list(range(100, 132))
    requests = [
        make_request(prompt=prompt, max_tokens=1),
        adapted(1, prompt=prompt, max_tokens=1, first=18),
        adapted(2, prompt=prompt, max_tokens=1, first=18),
        adapted(1, prompt=prompt, max_tokens=1, first=18),
        adapted(1, prompt=prompt, max_tokens=1, first=17),
        adapted(1, prompt=prompt, max_tokens=1),
        adapted(1, prompt=prompt, max_tokens=1),
        make_request(prompt=prompt, max_tokens=1),
    ]
    for request in requests:
        add(planner, request)
        drain(planner)
    assert [r.num_cached_tokens for r in requests] == [0, 16, 16, 28, 16, 0, 28, 28]
