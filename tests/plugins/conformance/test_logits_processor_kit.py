"""The kit of logits processors passes sound ones, and catches what is planted in others."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from jackfield.core.errors import InvalidRequest
from jackfield.core.protocols.logits_processors import (
    LogitsProcessor,
    LogitsProcessorSetup,
    ProcessedRows,
)
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.step import SlotStart
from jackfield.plugins.conformance.logits_processors import LogitsProcessorKit


class Avoid(LogitsProcessor):
    """Takes `avoid_last` from the logit of the last token, and of all tokens divisible by it."""

    parameters = frozenset({"avoid_last"})
    examples = ({"avoid_last": 2.0}, {"avoid_last": 5.0}, {"avoid_last": 11})
    stateless = True

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        value = (params.extra_args or {}).get("avoid_last")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise InvalidRequest("avoid_last must be a number above 0", param="avoid_last")

    def __init__(self, setup: LogitsProcessorSetup) -> None:
        self.setup = setup
        self.amounts = torch.zeros(setup.num_slots, device=setup.device)

    def start(self, slot: int, request: SlotStart) -> bool:
        amount = (request.params.extra_args or {}).get("avoid_last")
        if amount is None:
            return False
        self.amounts[slot] = float(amount)
        return True

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        last = self.setup.history[rows.device_slots, rows.lengths - 1].long()
        amounts = self.amounts[rows.device_slots].unsqueeze(1)
        return logits.scatter_add(1, last.unsqueeze(1), -amounts)


class Flatten(Avoid):
    """Keeps the order of logits."""

    parameters = frozenset({"flatten"})
    examples = ({"flatten": 0.5}, {"flatten": 0.9})
    argmax_invariant = True

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        pass

    def start(self, slot: int, request: SlotStart) -> bool:
        amount = (request.params.extra_args or {}).get("flatten")
        self.amounts[slot] = amount or 0.0
        return amount is not None

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        return logits * self.amounts[rows.device_slots].unsqueeze(1)


class MakesNaN(Avoid):
    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        return logits - logits.amin(dim=1, keepdim=True) + logits.amin(dim=1, keepdim=True)


class WrongShape(Avoid):
    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        return super().apply(logits, rows)[:1]


class HalfPrecision(Avoid):
    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        return super().apply(logits, rows).half()


class KnowsOtherRows(Avoid):
    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        return super().apply(logits, rows) - logits.mean()


class TakesRowsForSlots(Avoid):
    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        index = torch.arange(len(rows.slots))
        last = self.setup.history[rows.device_slots, rows.lengths - 1].long()
        return logits.scatter_add(1, last.unsqueeze(1), -self.amounts[index].unsqueeze(1))


class KeepsOldParameters(Avoid):
    def start(self, slot: int, request: SlotStart) -> bool:
        amount = (request.params.extra_args or {}).get("avoid_last")
        if amount is not None and not self.amounts[slot]:
            self.amounts[slot] = float(amount)
        return amount is not None


class ServesEverybody(Avoid):
    def start(self, slot: int, request: SlotStart) -> bool:
        super().start(slot, request)
        return True


class ServesWhoAskedBefore(Avoid):
    def start(self, slot: int, request: SlotStart) -> bool:
        return super().start(slot, request) or bool(self.amounts[slot])


class CountsCalls(Avoid):
    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        self.amounts[rows.device_slots] += 1
        return super().apply(logits, rows)


class CountsStarts(Avoid):
    def start(self, slot: int, request: SlotStart) -> bool:
        is_active = super().start(slot, request)
        self.amounts[slot] += len(request.token_ids)
        return is_active


class WritesHistory(Avoid):
    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        logits_out = super().apply(logits, rows)
        self.setup.history[rows.device_slots, rows.lengths - 1] = 0
        return logits_out


class ReadsBehindTheEnd(Avoid):
    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        last = self.setup.history[rows.device_slots, rows.lengths].long()
        amounts = self.amounts[rows.device_slots].unsqueeze(1)
        return logits.scatter_add(1, last.unsqueeze(1), -amounts)


class ForgetsParameters(Avoid):
    parameters = frozenset()


class RefusesItsExamples(Avoid):
    @classmethod
    def check(cls, params: SamplingParams) -> None:
        raise InvalidRequest("avoid_last must be something else", param="avoid_last")


class DoesNothing(Avoid):
    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        return logits


class LeavesNothing(Avoid):
    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf)


class SaysItKeepsTheArgmax(Avoid):
    argmax_invariant = True

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        amounts = self.amounts[rows.device_slots].unsqueeze(1)
        return logits.masked_fill(logits > logits.amax(dim=1, keepdim=True) - amounts * 1e-4, 0.0)


class SharedAmount(Avoid):
    """The last request's amount is everyone's."""

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        amounts = self.amounts.max().expand(len(rows.slots))
        last = self.setup.history[rows.device_slots, rows.lengths - 1].long()
        return logits.scatter_add(1, last.unsqueeze(1), -amounts.unsqueeze(1))


class Sharpens(Avoid):
    """Infinity for a token of its choice."""

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        made = super().apply(logits, rows)
        made[:, 0] = torch.inf
        return made


class HasRoomForFew(Avoid):
    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        logits_out = logits.clone()
        logits_out[:32] = super().apply(logits, rows)[:32]
        return logits_out


class ServesOnePlaceOfASlot(Avoid):
    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        last = list({slot: row for row, slot in enumerate(rows.slots)}.values())
        logits_out = logits.clone()
        logits_out[last] = super().apply(logits, rows)[last]
        return logits_out


class KeepsDrafts(Avoid):
    """Once it has seen a length, it leaves shorter ones alone."""

    def __init__(self, setup: LogitsProcessorSetup) -> None:
        super().__init__(setup)
        self.longest = torch.zeros(setup.num_slots, dtype=torch.int64)

    def start(self, slot: int, request: SlotStart) -> bool:
        self.longest[slot] = 0
        return super().start(slot, request)

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        slots = rows.device_slots
        self.longest.scatter_reduce_(0, slots, rows.lengths, "amax")
        done = (rows.lengths < self.longest[slots]).unsqueeze(1)
        return torch.where(done, logits, super().apply(logits, rows))


MUTANTS = [
    made
    for made in list(vars().values())
    if inspect.isclass(made) and issubclass(made, Avoid) and made not in (Avoid, Flatten)
]


def failures(subject: type[LogitsProcessor], **options: Any) -> list[str]:
    """The kit's tests that do not pass."""
    kit = type("Kit", (LogitsProcessorKit,), {"processor_class": subject, **options})()
    failed = []
    for name, function in inspect.getmembers(kit, inspect.ismethod):
        if name.startswith("test_"):
            try:
                function(subject)
            except pytest.skip.Exception:
                continue
            except (Exception, pytest.fail.Exception):
                failed.append(name)
    return failed


@pytest.mark.parametrize("subject", [Avoid, Flatten])
def test_sound_processors_pass(subject: type[LogitsProcessor]) -> None:
    assert failures(subject) == []
    refused = ({"avoid_last": -1}, {"avoid_last": "much"})
    assert subject is Flatten or failures(subject, refused=refused) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_fault_is_caught(mutant: type[LogitsProcessor]) -> None:
    assert failures(mutant)


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 8


def test_what_should_be_refused_and_is_not_is_caught() -> None:
    assert failures(Flatten, refused=({"flatten": "x"},))
