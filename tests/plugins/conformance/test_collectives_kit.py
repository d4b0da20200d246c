"""The kit of collectives: those in the box pass it, and planted bugs do not."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
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
BEFORE = "test_what_was_sent_may_be_overwritten_before_it_is_received"
AFTER = "test_what_is_received_is_there_after_the_wait"
LEAVES = "test_a_rank_may_leave_before_the_others"
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


class Later:
    """A transfer by a thread of its own, outside of the mode of the tensor that it fills."""

    def __init__(self, transfer: Any, into: torch.Tensor, arrived: torch.Tensor) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.filled = self.pool.submit(self.fill, transfer, into, arrived)

    def fill(self, transfer: Any, into: torch.Tensor, arrived: torch.Tensor) -> None:
        transfer.wait()
        into.copy_(arrived)

    def wait(self) -> None:
        self.filled.result()
        self.pool.shutdown()


def received_by_a_thread(self: Any, into: torch.Tensor, source: int) -> Any:
    arrived = torch.empty_like(into)
    return Later(Gloo.receive(self, arrived, source), into, arrived)


class NoWait:
    def __init__(self, transfer: Any) -> None:
        self.transfer = transfer

    def wait(self) -> None:
        """Forgotten."""


def sends_itself(self: Any, x: torch.Tensor, to: int) -> None:
    group, number = self._link(self.rank, to)
    self._sending.append((group.send([x], number, 0), x))


def sends_and_waits(self: Any, x: torch.Tensor, to: int) -> None:
    Gloo.send(self, x, to)
    self._sending[-1][0].wait()


def receives_at_once(self: Any, into: torch.Tensor, source: int) -> Any:
    transfer = Gloo.receive(self, into, source)
    transfer.wait()
    return NoWait(transfer)


def leaves_together(self: Any) -> None:
    with contextlib.suppress(RuntimeError):
        Gloo.all_reduce(self, torch.zeros(1))
    Gloo.close(self)


def joined_backwards(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat(Gloo.all_gather(self, x).chunk(self.size, -1)[::-1], -1)


def adds_in_half(self: Any, x: torch.Tensor, residual: Any = None) -> torch.Tensor:
    return Gloo.all_reduce(self, x.bfloat16(), residual).to(x.dtype)


IMPATIENT = {"seconds": 2.0}
MUTANTS = {
    "a thread that fills outside of inference mode": Mutant(
        subclass(Gloo, receive=received_by_a_thread),
        (ARRIVES, STAYS, MEANWHILE, AFTER, BEFORE),
    ),
    "a wait that does not": Mutant(
        subclass(Gloo, receive=lambda self, *args: NoWait(Gloo.receive(self, *args))),
        (AFTER,),
        perhaps=(ARRIVES, STAYS, MEANWHILE, BEFORE),
    ),
    "sends what is overwritten": Mutant(
        subclass(Gloo, send=sends_itself), (BEFORE,), perhaps=(STAYS,)
    ),
    "a send that waits": Mutant(
        subclass(Gloo, send=sends_and_waits), (BEFORE,), changes=IMPATIENT, perhaps=(STAYS,)
    ),
    "a receive that waits": Mutant(
        subclass(Gloo, receive=receives_at_once), (MEANWHILE, AFTER), changes=IMPATIENT
    ),
    "leaves with the others": Mutant(
        subclass(Gloo, close=leaves_together), (LEAVES,), changes=IMPATIENT, perhaps=(GROUPS,)
    ),
    "joins backwards": Mutant(subclass(Gloo, all_gather=joined_backwards), (JOINED,)),
    "sums in bfloat16": Mutant(subclass(Gloo, all_reduce=adds_in_half), (SUMS, RESIDUAL)),
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
        Recounts,
        (
            JOINED,
            SUMS,
            ORDER,
            GROUPS,
            ENVIRONMENT,
            RESIDUAL,
            ARRIVES,
            STAYS,
            MEANWHILE,
            BEFORE,
            AFTER,
        ),
    ),
    "an error without the field": Mutant(LateError, (IN_TIME,)),
}

TestMutants = mutant_tests(Kit, MUTANTS)
