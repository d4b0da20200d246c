"""Random traffic with drafts, of which some are accepted: the tokens are those of one at a time."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from test_scheduler_state_machine import (
    ChunksMachine,
    OneWindowMachine,
    PriorityMachine,
    SchedulerMachine,
    WindowsMachine,
)

from jackfield.core.scheduling.parts.draft_widths import DraftWidths, RowDrafts

NIGHTLY_STEPS = 20_000
STEPS = 50


class DraftMachine(SchedulerMachine):
    num_drafts = 3


class Padded(DraftWidths):
    """All rows of a step are as wide, also those whose requests end within it."""

    def begin(self, num_rows: int, alone: bool, rows: Collection[RowDrafts]) -> int:
        return super().begin(num_rows, alone, rows) or 4


class PaddedDraftMachine(PriorityMachine):
    num_drafts = 4
    draft_widths = Padded(4)


class StarvedDraftMachine(PriorityMachine):
    """Drafts take what is left of few blocks and a small budget."""

    num_drafts = 5
    num_blocks = 12
    budget = 9


class DraftsInWindowsMachine(WindowsMachine):
    num_drafts = 4


class DraftsInOneWindowMachine(OneWindowMachine):
    """Rejected drafts do not bring back what lies before the window."""

    num_drafts = 5
    budget = 7


class DraftsInChunksMachine(ChunksMachine):
    num_drafts = 4


class OneTokenBlocksMachine(SchedulerMachine):
    """Each rejected draft gives a block back."""

    num_drafts = 2
    block_size = 1
    num_blocks = 42


MACHINES = (
    DraftMachine,
    PaddedDraftMachine,
    StarvedDraftMachine,
    DraftsInWindowsMachine,
    DraftsInOneWindowMachine,
    DraftsInChunksMachine,
    OneTokenBlocksMachine,
)


def run_machine(machine: type[SchedulerMachine], steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=steps // STEPS, stateful_step_count=STEPS, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_random_steps(machine: type[SchedulerMachine]) -> None:
    accepted = 0

    class Counting(machine):  # type: ignore[misc, valid-type]
        def teardown(self) -> None:
            nonlocal accepted
            super().teardown()
            accepted += self.worker.num_accepted

    run_machine(Counting, 900)
    assert accepted > 0, "the machine accepts no draft"


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_many_random_steps(machine: type[SchedulerMachine]) -> None:
    run_machine(machine, NIGHTLY_STEPS)
