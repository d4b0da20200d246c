"""The kit of all-to-all backends: the one in the box passes it, and planted bugs do not."""

from __future__ import annotations

from typing import Any

import torch
from mutants import Mutant, mutant_tests, plugin_of, subclass

from jackfield.plugins.collectives.all_to_all import AllToAll
from jackfield.plugins.conformance.all2all import All2AllKit


class TestAllToAll(All2AllKit):
    name = "all_to_all"


class Kit(All2AllKit):
    name = "subject"
    plugin = plugin_of("all2all_backend", "subject", AllToAll)


SUMS = "test_sums_of_all_experts_come_back"
ORDER = "test_calls_of_unlike_sizes_stay_in_order"


def without_weights(self: Any, *args: Any, **more: Any) -> Any:
    sent = AllToAll.dispatch(self, *args, **more)
    return sent._replace(weights=torch.ones_like(sent.weights))


def one_expert_off(self: Any, x: Any, experts: Any, weights: Any, **more: Any) -> Any:
    sent = AllToAll.dispatch(self, x, experts, weights, **more)
    return sent._replace(experts=(sent.experts - 1).clamp(min=-1))


def last_rank_forgotten(self: Any, out: Any, handle: Any) -> Any:
    if self.rank == self.size - 1:
        out = torch.zeros_like(out)
    return AllToAll.combine(self, out, handle)


def overwriting(self: Any, x: Any, *args: Any, **more: Any) -> Any:
    sent = AllToAll.dispatch(self, x, *args, **more)
    x.zero_()
    return sent


def rounding(self: Any, x: Any, *args: Any, **more: Any) -> Any:
    return AllToAll.dispatch(self, x.bfloat16().to(x.dtype), *args, **more)


def wider(self: Any, out: Any, handle: Any) -> Any:
    return AllToAll.combine(self, out.float(), handle)


class Recounts(AllToAll):
    """Its ranks are numbered from one."""

    def __init__(self, setup: Any) -> None:
        super().__init__(setup)
        self.rank += 1


class LateError(AllToAll):
    """Says what went wrong by another name."""

    def __init__(self, setup: Any) -> None:
        try:
            super().__init__(setup)
        except Exception as error:
            raise TimeoutError(str(error)) from error


MUTANTS = {
    "sends states in 16 bits": Mutant(subclass(AllToAll, dispatch=rounding), (SUMS, ORDER)),
    "adds to another type": Mutant(subclass(AllToAll, combine=wider), (SUMS,)),
    "counts from one": Mutant(Recounts, (ORDER, SUMS)),
    "an error without the field": Mutant(
        LateError, ("test_a_group_that_nobody_leads_is_refused_in_time",)
    ),
    "forgets weights": Mutant(subclass(AllToAll, dispatch=without_weights), (SUMS, ORDER)),
    "numbers experts from one": Mutant(subclass(AllToAll, dispatch=one_expert_off), (SUMS, ORDER)),
    "drops a rank's part": Mutant(subclass(AllToAll, combine=last_rank_forgotten), (SUMS, ORDER)),
    "overwrites what it sends": Mutant(subclass(AllToAll, dispatch=overwriting), (ORDER, SUMS)),
    "does not say whether it is recordable": Mutant(
        subclass(AllToAll, recordable=None), ("test_it_says_whether_calls_can_be_recorded",)
    ),
}

TestMutants = mutant_tests(Kit, MUTANTS)
