"""The kit of parts: the outside examples pass it, and planted bugs do not."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from mutants import Mutant, mutant_tests, plugin_of, subclass

import jackfield
from jackfield.core.errors import InvalidRequest
from jackfield.core.step import PartPlan
from jackfield.core.worker.parts.part import PartStart
from jackfield.plugins.conformance.parts import PartKit

for name in ("token-budget", "activation-watch"):
    sys.path.append(f"{jackfield.__path__[0]}/examples/plugins/jackfield-{name}/src")

from jackfield_activation_watch import on_device  # noqa: E402
from jackfield_activation_watch.on_device import Peaks, PeaksStart, _report  # noqa: E402
from jackfield_activation_watch.part import ActivationWatch, Watch, WatchPlan  # noqa: E402
from jackfield_token_budget.part import GROUP, TOKENS, Budgets, Readiness, TokenBudget  # noqa: E402

DECLARED = "test_what_it_declares_fits_together"
JUNK = "test_other_values_are_refused_or_served"
TRAFFIC = "test_random_traffic_ends"
STILL = "test_an_engine_never_stands_still"
SAME = "test_requests_that_do_not_address_it_get_the_same_tokens"
BESIDE = "test_requests_beside_those_that_address_it_get_their_tokens"
REMEMBERED = "test_nothing_is_remembered_of_requests_that_have_ended"
RELEASED = "test_a_slot_that_is_released_is_forgotten"
ADDRESSES = "test_what_layers_find_depends_on_addresses_alone"
ENGINE = "test_an_engine_serves_with_it"


class BudgetKit(PartKit):
    __test__ = False
    name = "token_budget"
    plugin = plugin_of("part", "token_budget", TokenBudget)
    patience = 10.0


class WatchKit(PartKit):
    __test__ = False
    name = "activation_watch"
    plugin = plugin_of("part", "activation_watch", ActivationWatch)
    patience = 10.0


# ---------------------------------------------------------------- the scheduler half


def budgets(**changes: Any) -> type:
    """The part, with another scheduler half."""
    half = subclass(Budgets, **changes)
    return subclass(TokenBudget, scheduler_part=classmethod(lambda cls, setup, s: half(s)))


def group_stays(self: Any, request: Any) -> None:
    if (group := self._of(request)) is not None:
        group.members.discard(request)


def one_more(self: Any, request: Any, count: int, spare: int) -> int:
    return Budgets.decode_tokens(self, request, count, spare) + 1


def below_nothing(self: Any, request: Any, count: int, spare: int) -> int:
    group = self._of(request)
    if group is None:
        return count
    group.left -= count
    return min(count, group.left)


def whole_prompt(self: Any, request: Any, count: int) -> int:
    return request.num_tokens if self._of(request) is not None else count


def counts_once(self: Any, builder: Any) -> None:
    for group in self._groups.values():
        if not group.left and group.num_known < group.budget:
            group.count()
    # Those whose budget is spent are not ended.


def ends_in_silence(self: Any, group: Any) -> None:
    for member in list(group.members):
        self._services.requests.end(member, "length")


def any_value(cls: Any, params: Any) -> None:
    """Checks nothing."""


def compares(cls: Any, params: Any) -> None:
    extra = params.extra_args or {}
    if extra[TOKENS] < 1 or not extra[GROUP]:
        raise InvalidRequest("no budget", param=TOKENS)


def nameless(cls: Any, params: Any) -> None:
    try:
        TokenBudget.check(params)
    except InvalidRequest as error:
        raise InvalidRequest(str(error)) from None


def takes_a_block(self: Any, request: Any, hits: Any, builder: Any) -> None:
    if self._of(request) is not None and self._services.kv.can_hold(request.num_tokens, hits, 1):
        self._services.kv.pool.allocate(1)


def backwards(self: Any, requests: list[Any]) -> list[Any]:
    return requests[::-1]


def holds_others_back(self: Any, request: Any, count: int, spare: int) -> int:
    if self._of(request) is None and request.num_tokens % 2:
        request.look_at = 0
        return 0 if toggled(self) else count
    return Budgets.decode_tokens(self, request, count, spare)


def toggled(self: Any) -> bool:
    self.odd = not getattr(self, "odd", False)
    return bool(self.odd)


def looks_at_all(self: Any, request: Any) -> int:
    return 0


def keeps_the_last(self: Any, request: Any) -> None:
    self.last = request
    Budgets.ended(self, request)


def counts_by_id(self: Any, request: Any) -> None:
    self.seen = {*getattr(self, "seen", ()), request.request_id}
    Budgets.ended(self, request)


def without_a_type(self: Any, step: int, builder: Any) -> PartPlan:
    return PartPlan()


def ends_all(self: Any, request: Any, row: int, result: Any, tokens: Any) -> str | None:
    return "length" if len(request.output_token_ids) >= 3 else None


def running_alone(self: Any, request: Any) -> None:
    if (group := self._of(request)) is not None and request.status.value != "running":
        raise KeyError(group)
    Budgets.ended(self, request)


def sure_of_results(self: Any, dropped: Any) -> None:
    next(iter(dropped))


def never_ready(self: Any, request: Any, hits: Any, reserve: int) -> Readiness:
    return Readiness.READY if self._of(request) is None else Readiness.LOADING


BUDGET_MUTANTS = {
    "groups are never forgotten": Mutant(budgets(ended=group_stays), (REMEMBERED,)),
    "a token more than the row may have": Mutant(
        budgets(decode_tokens=one_more),
        (TRAFFIC, STILL, REMEMBERED, JUNK, BESIDE),
        perhaps=(ENGINE,),
    ),
    "fewer than no tokens": Mutant(
        budgets(decode_tokens=below_nothing), (TRAFFIC, STILL, REMEMBERED, BESIDE)
    ),
    "a chunk longer than it may be": Mutant(
        budgets(chunk_tokens=whole_prompt),
        (TRAFFIC, STILL, REMEMBERED, JUNK, BESIDE),
        perhaps=(ENGINE,),
    ),
    "spent budgets end nothing": Mutant(
        budgets(begin_plan=counts_once), (STILL, REMEMBERED, TRAFFIC, BESIDE), perhaps=(ENGINE,)
    ),
    "requests end without an update": Mutant(
        budgets(_end=ends_in_silence), (STILL, REMEMBERED, TRAFFIC, BESIDE), perhaps=(ENGINE,)
    ),
    "any value is accepted": Mutant(subclass(TokenBudget, check=classmethod(any_value)), (JUNK,)),
    "check raises something else": Mutant(
        subclass(TokenBudget, check=classmethod(compares)), (JUNK,)
    ),
    "an error without the field": Mutant(
        subclass(TokenBudget, check=classmethod(nameless)), (JUNK,)
    ),
    "a block that nobody knows of": Mutant(
        budgets(admit=takes_a_block), (STILL, TRAFFIC, REMEMBERED, JUNK, BESIDE), perhaps=(ENGINE,)
    ),
    "rows in another order": Mutant(
        budgets(eligible=backwards),
        (TRAFFIC, STILL, REMEMBERED, JUNK, BESIDE),
        perhaps=(ENGINE, SAME),
    ),
    "others wait": Mutant(
        budgets(decode_tokens=holds_others_back, look_at=looks_at_all),
        (SAME, REMEMBERED),
        perhaps=(ENGINE,),  # If the last row waits, nothing wakes the engine.
    ),
    "others end": Mutant(budgets(kept=ends_all), (SAME,), perhaps=(ENGINE,)),
    "the last request is kept": Mutant(budgets(ended=keeps_the_last), (REMEMBERED,)),
    "ids of requests are kept": Mutant(budgets(ended=counts_by_id), (REMEMBERED,)),
    "a plan of no type": Mutant(
        budgets(plan_part=without_a_type), (TRAFFIC, STILL, REMEMBERED, JUNK, BESIDE, SAME)
    ),
    "only running requests end": Mutant(
        budgets(ended=running_alone), (TRAFFIC, STILL, REMEMBERED, BESIDE), perhaps=(ENGINE,)
    ),
    "a failed step has dropped results": Mutant(
        budgets(step_failed=sure_of_results), (TRAFFIC, REMEMBERED, SAME)
    ),
    "it waits for what never comes": Mutant(
        budgets(readiness=never_ready),
        (STILL, TRAFFIC, REMEMBERED, JUNK, BESIDE),
        perhaps=(ENGINE,),
    ),
    "the half has another name": Mutant(
        budgets(name="budget"), (TRAFFIC, STILL, REMEMBERED, JUNK, BESIDE, SAME), perhaps=(ENGINE,)
    ),
    "examples that it does not accept": Mutant(
        subclass(TokenBudget, examples=({GROUP: "a"},)),
        (DECLARED, STILL, REMEMBERED, TRAFFIC, BESIDE),
        perhaps=(ENGINE,),
    ),
    "it excludes what there is not": Mutant(
        subclass(TokenBudget, excludes={"speculations": "they do not fit"}), (DECLARED,)
    ),
}


class TestBudgetMutants(mutant_tests(BudgetKit, BUDGET_MUTANTS)):  # type: ignore[misc]
    pass


# ---------------------------------------------------------------- the worker half


def watching(scheduler: type[Watch] = Watch, **changes: Any) -> type:
    """The part, with another worker half."""
    half = subclass(Peaks, **changes)

    class Start(PeaksStart):
        def make(self, site: Any) -> Any:
            made = super().make(site)
            return half(made._peaks)

    def worker_part(cls: Any, setup: Any, start: Any) -> PartStart:
        return Start(start)

    def scheduler_part(cls: Any, setup: Any, services: Any) -> Watch:
        return scheduler(ends=True)

    return subclass(
        ActivationWatch,
        worker_part=classmethod(worker_part),
        scheduler_part=classmethod(scheduler_part),
    )


def kept_slot(self: Any, slot: int) -> None:
    """Forgets nothing."""


def surely_taken(self: Any, slot: int) -> None:
    del self._limits[slot]


def former_stays(self: Any, start: Any, in_process: Any = None) -> None:
    if on_device.NAME in start.parts:
        self._limits[start.slot] = start.parts[on_device.NAME].limit


def in_place(self: Any, inputs: Any, hidden: Any) -> None:
    states = hidden if isinstance(hidden, tuple) else (hidden,)
    for state in states:
        state.abs_()
    Peaks.computed(self, inputs, hidden)


def other_tokens(self: Any, plan: Any, output: Any, rows: Any) -> None:
    if "chosen" in output:
        output["chosen"] = output["chosen"].clamp(max=20)
    Peaks.sampled(self, plan, output, rows)


def limits_when_it_is_done(self: Any, part: Any, step: Any) -> Any:
    if not isinstance(part, WatchPlan):
        return None
    slots = step.plan.slots
    return lambda: _report({row: self._limits[slots[row]] for row in part.rows}, step)


def dictionary(self: Any, part: Any, step: Any) -> Any:
    report = Peaks.after(self, part, step)
    return report and (lambda: msgspec.structs.asdict(report()))


def numbers(self: Any, inputs: Any) -> Any:
    return inputs.positions.tolist()


def all_steps(self: Any, part: Any, step: Any) -> Any:
    self.steps = [*getattr(self, "steps", []), step.plan.step]
    return Peaks.after(self, part, step)


def sure_of_a_plan(self: Any, part: Any, plan: Any) -> None:
    assert len(part.rows) <= len(plan.slots)


class LooseStart(msgspec.Struct, frozen=True):
    limit: Any


class AsText(Watch):
    """Sends another struct than it says."""

    def start_part(self, request: Any) -> Any:
        start = super().start_part(request)
        return start and LooseStart(start.limit)


class LoosePlan(PartPlan, frozen=True):
    rows: Any


class AsSet(Watch):
    """Sends a set, which bytes make a list of."""

    def plan_part(self, step: int, builder: Any) -> Any:
        plan = super().plan_part(step, builder)
        return plan and LoosePlan(set(plan.rows))


WATCH_MUTANTS = {
    "slots are not released": Mutant(watching(release=kept_slot), (RELEASED,)),
    "a slot is released once": Mutant(
        watching(release=surely_taken),
        (RELEASED, STILL, REMEMBERED, JUNK, TRAFFIC, BESIDE, SAME, ADDRESSES),
        perhaps=(ENGINE,),
    ),
    "the request before stays": Mutant(watching(start=former_stays), (RELEASED,)),
    "states are changed": Mutant(watching(computed=in_place), (SAME,), perhaps=(ENGINE,)),
    "tokens are changed": Mutant(watching(sampled=other_tokens), (SAME,), perhaps=(ENGINE,)),
    "slots are read when the step is done": Mutant(
        watching(after=limits_when_it_is_done), (TRAFFIC, RELEASED, STILL, REMEMBERED, JUNK, BESIDE)
    ),
    "a report of no type": Mutant(
        watching(after=dictionary),
        (TRAFFIC, RELEASED, STILL, REMEMBERED, JUNK, BESIDE),
        perhaps=(ENGINE,),
    ),
    "a result that was not declared": Mutant(
        subclass(ActivationWatch, result_type=None),
        (TRAFFIC, RELEASED, STILL, REMEMBERED, JUNK, BESIDE),
    ),
    "layers find numbers": Mutant(watching(context=numbers), (ADDRESSES,)),
    "steps are kept": Mutant(watching(after=all_steps), (REMEMBERED,)),
    "a plan always has its struct": Mutant(
        watching(before=sure_of_a_plan),
        (TRAFFIC, STILL, REMEMBERED, JUNK, BESIDE, SAME),
        perhaps=(ENGINE,),
    ),
    "a start of another type": Mutant(
        watching(AsText), (TRAFFIC, RELEASED, STILL, REMEMBERED, JUNK, BESIDE)
    ),
    "a set in a plan": Mutant(
        subclass(watching(AsSet), plan_type=LoosePlan),
        (TRAFFIC, RELEASED, STILL, REMEMBERED, JUNK, BESIDE),
    ),
}


class TestWatchMutants(mutant_tests(WatchKit, WATCH_MUTANTS)):  # type: ignore[misc]
    pass
