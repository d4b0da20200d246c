"""The kit of schedule policies: the policies in the box pass it, and planted bugs do not."""

from __future__ import annotations

from typing import Any

from mutants import Mutant, mutant_tests, plugin_of, subclass

from jackfield.plugins.conformance.policies import SchedulePolicyKit


class TestFirstComeFirstServed(SchedulePolicyKit):
    name = "fcfs"
    expected_order = [{"arrival": 1.0}, {"arrival": 2.0, "priority": -5}, {"arrival": 3.0}]


class TestPriority(SchedulePolicyKit):
    name = "priority"
    expected_order = [
        {"priority": -1},
        {"priority": 0, "arrival": 4.0},
        {"priority": 0, "arrival": 5.0},
        {"priority": 7},
    ]


class Sound:
    """Short prompts first."""

    def key(self, request: Any) -> tuple[Any, ...]:
        return (request.num_prompt_tokens, request.arrival)


class Kit(SchedulePolicyKit):
    name = "subject"
    plugin = plugin_of("schedule_policy", "subject", Sound)
    expected_order = [{"prompt_token_ids": [5] * n} for n in (2, 5, 9)]


class LooksThroughAll(Sound):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def key(self, request: Any) -> tuple[Any, ...]:
        self.seen.append(request.request_id)
        return (sum(1 for item in self.seen if item == ""), *super().key(request))


class NeedsArguments(Sound):
    def __init__(self, quota: int) -> None:
        self.quota = quota


def bumps(self: Any, request: Any) -> tuple[Any, ...]:
    request.priority += 1
    return Sound.key(self, request)


async def awaited(self: Any, request: Any) -> tuple[Any, ...]:
    return Sound.key(self, request)


KEYS, ORDER = "test_every_request_gets_a_tuple", "test_keys_order_all_requests"
UNCHANGED = "test_a_request_is_read_and_not_changed"
COST = "test_a_key_costs_the_same_however_many_came_before"
MEANT = "test_the_order_is_the_one_that_is_meant"
ENDS, ENGINE = "test_every_request_comes_to_its_end", "test_an_engine_serves_with_it"
EVERY = (KEYS, ORDER, UNCHANGED, COST, MEANT, ENDS, ENGINE)


def keyed(key: Any) -> type:
    return subclass(Sound, key=key)


MUTANTS = {
    "a list": Mutant(
        keyed(lambda self, r: [r.arrival, 0]), (KEYS, ORDER, UNCHANGED, MEANT, ENDS, ENGINE)
    ),
    "a number": Mutant(
        keyed(lambda self, r: r.num_prompt_tokens), (KEYS, ORDER, UNCHANGED, MEANT, ENDS, ENGINE)
    ),
    "a coroutine": Mutant(keyed(awaited), (KEYS, ORDER, UNCHANGED, MEANT, ENDS, ENGINE)),
    "raises for a pooling request": Mutant(
        keyed(lambda self, r: (r.pooling.task + "", 0) if r.pooling else Sound.key(self, r)),
        (KEYS, ORDER, UNCHANGED),
    ),
    "NaN for an early arrival": Mutant(
        keyed(lambda self, r: (r.arrival if r.arrival else float("nan"),)), (ORDER, MEANT)
    ),
    "text beside numbers": Mutant(
        keyed(lambda self, r: (r.cache_salt or r.num_prompt_tokens, r.arrival)), (ORDER,)
    ),
    "what cannot be ordered": Mutant(
        keyed(lambda self, r: (r.params, r.arrival)), (ORDER, MEANT, ENDS, ENGINE)
    ),
    "a longer tuple for some": Mutant(
        keyed(lambda self, r: (*Sound.key(self, r), *([0] if r.cache_salt else []))), (ORDER,)
    ),
    "changes the priority": Mutant(keyed(bumps), (UNCHANGED,)),
    "looks through all earlier requests": Mutant(LooksThroughAll, (COST,)),
    "no number for a request without a leader": Mutant(
        keyed(lambda self, r: (None if r.leader is None else 0, r.arrival)),
        (ORDER,),
        perhaps=(MEANT, ENDS, ENGINE),
    ),
    "ordered by sets": Mutant(
        keyed(lambda self, r: (frozenset(r.prompt_token_ids), r.arrival)),
        (ORDER,),
        perhaps=(MEANT, ENDS, ENGINE),
    ),
    "longest first": Mutant(keyed(lambda self, r: (-r.num_prompt_tokens, r.arrival)), (MEANT,)),
    "cannot be made": Mutant(NeedsArguments, EVERY),
}

TestMutants = mutant_tests(Kit, MUTANTS)
