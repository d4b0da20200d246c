"""Random traffic with compactions: forks, aborts, preemption, failed steps, starved pools."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from test_scheduler_state_machine import PriorityMachine

from jackfield.core.scheduling.compression import CompressionRule

NIGHTLY_STEPS = 20_000
STEPS = 50


class CompactingMachine(PriorityMachine):
    """Prompts of 17 tokens and more are cut to 16, or to little more."""

    kv_compression = CompressionRule(ratio=0.3)
    num_blocks = 20


class RecompactingMachine(PriorityMachine):
    """Caches are compacted again every few tokens, in a pool that is often starved."""

    kv_compression = CompressionRule(budget=16, interval=4)
    num_blocks = 12


class PressedMachine(PriorityMachine):
    """Caches are compacted only when blocks run out."""

    kv_compression = CompressionRule(ratio=0.3, on_pressure=True)
    num_blocks = 13


MACHINES = (CompactingMachine, RecompactingMachine, PressedMachine)


def run_machine(machine: type[PriorityMachine], steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=steps // STEPS, stateful_step_count=STEPS, deadline=None, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_random_steps(machine: type[PriorityMachine]) -> None:
    run_machine(machine, 1500)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_many_random_steps(machine: type[PriorityMachine]) -> None:
    run_machine(machine, NIGHTLY_STEPS)
