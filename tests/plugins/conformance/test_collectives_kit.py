"""The kit of collectives: those in the box pass it, and planted bugs do not."""

from __future__ import annotations

from typing import Any

import torch
from mutants import Mutant, mutant_tests, plugin_of, subclass

from jackfield.core.protocols.collectives import CollectivesSetup
from jackfield.plugins.collectives.builtin import Gloo
from jackfield.plugins.conformance.collectives import CollectivesKit


class TestGloo(CollectivesKit):
    name = "gloo"


class TestPeerMemory(CollectivesKit):
    name = "peer_memory"


class TestNccl(CollectivesKit):
    """On a machine with GPUs."""

    name = "nccl"


class Kit(CollectivesKit):
    name = "subject"
    plugin = plugin_of("collectives", "subject", Gloo)


SUMS = "test_sums_are_the_same_bits_on_each_rank"
JOINED = "test_parts_are_joined_in_the_last_dimension_by_rank"
ORDER = "test_many_calls_stay_in_order"
GROUPS = "test_two_groups_of_one_process_do_not_meet"
ENVIRONMENT = "test_the_environment_configures_nothing"
RESIDUAL = "test_a_residual_is_added_once"
ARRIVES, STAYS = "test_what_is_sent_arrives", "test_what_is_sent_stays_in_order_and_as_it_was"
MEANWHILE = "test_a_rank_need_not_wait_for_what_is_on_its_way"
IN_TIME = "test_a_group_that_nobody_leads_is_refused_in_time"


def own_first(self: Any, x: torch.Tensor, residual: Any = None) -> torch.Tensor:
    """Sums in another order on each rank."""
    parts = list(Gloo.all_gather(self, x.flatten()).view(self.size, *x.shape))
    total = parts.pop(self.rank)
    for part in parts:
        total = total + part
    return total if residual is None else residual + total


def joined_in_front(self: Any, x: torch.Tensor) -> torch.Tensor:
    joined = Gloo.all_gather(self, x.flatten()).view(self.size, *x.shape)
    return joined.flatten(0, 1) if x.dim() > 1 else joined.flatten()


def overwrites(self: Any, x: torch.Tensor) -> torch.Tensor:
    joined = Gloo.all_gather(self, x)
    x.zero_()
    return joined


def wider(self: Any, x: torch.Tensor, residual: Any = None) -> torch.Tensor:
    return Gloo.all_reduce(self, x.float(), residual)


def largest(self: Any, x: torch.Tensor, residual: Any = None) -> torch.Tensor:
    most = Gloo.all_gather(self, x.flatten()).view(self.size, *x.shape).amax(0)
    return most if residual is None else residual + most


def residual_of_each(self: Any, x: torch.Tensor, residual: Any = None) -> torch.Tensor:
    return Gloo.all_reduce(self, x if residual is None else x + residual)


def own_alone(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x.repeat(*[1] * (x.dim() - 1), self.size)


class Recounts(Gloo):
    """Its ranks are numbered from one."""

    def __init__(self, setup: CollectivesSetup) -> None:
        super().__init__(setup)
        self.rank += 1


class LateError(Gloo):
    """Says what went wrong by another name."""

    def __init__(self, setup: CollectivesSetup) -> None:
        try:
            super().__init__(setup)
        except Exception as error:
            raise TimeoutError(str(error)) from error


MUTANTS = {
    "sums in the order of ranks from its own": Mutant(
        subclass(Gloo, all_reduce=own_first), (SUMS,)
    ),
    "joins in front": Mutant(subclass(Gloo, all_gather=joined_in_front), (JOINED,)),
    "destroys what it joins": Mutant(subclass(Gloo, all_gather=overwrites), (ORDER,)),
    "sums in another type": Mutant(subclass(Gloo, all_reduce=wider), (SUMS,)),
    "the largest in place of a sum": Mutant(
        subclass(Gloo, all_reduce=largest),
        (SUMS, ORDER, GROUPS, ENVIRONMENT, RESIDUAL, MEANWHILE),
    ),
    "adds each rank's residual": Mutant(subclass(Gloo, all_reduce=residual_of_each), (RESIDUAL,)),
    "joins its own": Mutant(subclass(Gloo, all_gather=own_alone), (JOINED,)),
    "counts from one": Mutant(
        Recounts, (JOINED, SUMS, ORDER, GROUPS, ENVIRONMENT, RESIDUAL, ARRIVES, STAYS, MEANWHILE)
    ),
    "an error without the field": Mutant(LateError, (IN_TIME,)),
}

TestMutants = mutant_tests(Kit, MUTANTS)
