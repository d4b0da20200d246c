"""Random traffic with compactions: forks, aborts, preemption, failed steps, starved pools."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from scheduled import compactions_of, metadata_of
from test_scheduler_state_machine import (
    ConnectorPriorityMachine,
    PriorityMachine,
    SmallWindowsMachine,
    WindowsMachine,
)

from jackfield.core.cache.groups import CacheGroup
from jackfield.core.cache.level_options import CacheLevel, LevelFormat
from jackfield.core.cache.reach import Reach
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling.parts.kv_compression import CompressionRule

NIGHTLY_STEPS = 20_000
STEPS = 50


class CompactingMachine(PriorityMachine):
    """Prompts of 17 tokens and more are cut to 16, or to little more."""

    kv_compression = CompressionRule(ratio=0.3)
    num_blocks = 20


class RecompactingMachine(PriorityMachine):
    """Caches are compacted again every few tokens, of prompts, too, in a pool that is often
    starved."""

    kv_compression = CompressionRule(budget=16, interval=4, prompt_interval=5)
    num_blocks = 12


class PressedMachine(PriorityMachine):
    """Caches are compacted only when blocks run out."""

    kv_compression = CompressionRule(ratio=0.3, on_pressure=True)
    num_blocks = 13


class CompactingConnectorMachine(ConnectorPriorityMachine):
    """Blocks are loaded and saved while caches are compacted."""

    kv_compression = CompressionRule(ratio=0.3, interval=6, prompt_interval=18)
    num_blocks = 20


class PressedConnectorMachine(ConnectorPriorityMachine):
    """What was preempted comes back from the far side."""

    kv_compression = CompressionRule(ratio=0.3, on_pressure=True)
    num_blocks = 13


class CompactingWindowsMachine(WindowsMachine):
    """Groups with windows keep their blocks, which begin within blocks."""

    kv_compression = CompressionRule(ratio=0.3, interval=6)


class CompactingChunksMachine(PriorityMachine):
    """Chunks begin where they did: what is dropped is a multiple of 6 and of a block, at least what
    no layer sees any more. Two groups keep all tokens."""

    groups = (
        CacheGroup((0,)), CacheGroup((1,)), CacheGroup((2,), Reach(chunk_size=6)),
        CacheGroup((3,), Reach(5)),
    )  # fmt: skip
    kv_compression = CompressionRule(budget=16, interval=4, prompt_interval=5)
    num_blocks = 37


class PressedWindowsMachine(SmallWindowsMachine):
    kv_compression = CompressionRule(ratio=0.3, on_pressure=True, threshold=0.8)


class InnerWindowsMachine(PriorityMachine):
    """A layer with a window in a group that keeps all tokens."""

    groups = (CacheGroup((0, 1), None, (Reach(21), Reach(chunk_size=3))),)
    kv_compression = CompressionRule(ratio=0.2, interval=5)
    num_blocks = 20


class CompactingDraftsMachine(PriorityMachine):
    """A cache is compacted once its drafts are decided."""

    num_drafts = 3
    kv_compression = CompressionRule(ratio=0.3, interval=5, prompt_interval=7)
    num_blocks = 20


class CompactingDraftsInWindowsMachine(WindowsMachine):
    num_drafts = 4
    kv_compression = CompressionRule(ratio=0.3, interval=6)


class PressedDraftsMachine(PriorityMachine):
    num_drafts = 2
    kv_compression = CompressionRule(ratio=0.3, on_pressure=True, threshold=0.6)
    num_blocks = 13


LEVELS = {
    "levels": (CacheLevel(8, 1.0, 3), CacheLevel(4, 0.5, 9)),
    "formats": (LevelFormat(8, 7), LevelFormat(4, 12)),
}


class LeveledMachine(PriorityMachine):
    """Tokens move to two levels, whose blocks hold 7 and 12."""

    kv_compression = CompressionRule(**LEVELS, interval=5)
    num_blocks = 20


class LeveledPromptsMachine(PriorityMachine):
    """Within prompts, too, in a pool that is often starved: targets are among the sources."""

    kv_compression = CompressionRule(**LEVELS, interval=4, prompt_interval=9)
    num_blocks = 12


class ImportanceMachine(PriorityMachine):
    """Tokens of an age go to two levels."""

    kv_compression = CompressionRule(
        levels=(CacheLevel(16, 0.3, 4), CacheLevel(8, 0.25, 10), CacheLevel(4, 0.05, 10)),
        formats=(LevelFormat(16, 4), LevelFormat(8, 7), LevelFormat(4, 12)), interval=3,
    )  # fmt: skip
    num_blocks = 20


class PressedLevelsMachine(PriorityMachine):
    kv_compression = CompressionRule(**LEVELS, on_pressure=True, threshold=0.5)
    num_blocks = 13


class LeveledConnectorMachine(ConnectorPriorityMachine):
    kv_compression = CompressionRule(**LEVELS, interval=6, prompt_interval=18)
    num_blocks = 20


class LeveledWindowsMachine(WindowsMachine):
    """No level begins within a window."""

    kv_compression = CompressionRule(
        levels=(CacheLevel(8, 1.0, 12), CacheLevel(4, 0.5, 20)), formats=LEVELS["formats"],
        interval=6,
    )  # fmt: skip


class LeveledDraftsMachine(PriorityMachine):
    num_drafts = 3
    kv_compression = CompressionRule(**LEVELS, interval=5, prompt_interval=7)
    num_blocks = 20


MACHINES = (
    LeveledMachine,
    LeveledPromptsMachine,
    ImportanceMachine,
    PressedLevelsMachine,
    LeveledConnectorMachine,
    LeveledWindowsMachine,
    LeveledDraftsMachine,
    CompactingMachine,
    RecompactingMachine,
    PressedMachine,
    CompactingConnectorMachine,
    PressedConnectorMachine,
    CompactingWindowsMachine,
    CompactingChunksMachine,
    PressedWindowsMachine,
    InnerWindowsMachine,
    CompactingDraftsMachine,
    CompactingDraftsInWindowsMachine,
    PressedDraftsMachine,
)


def test_a_load_gets_blocks_that_a_compaction_of_the_same_plan_reads() -> None:
    """The request that waits is in the far side's store: the running one gives it room."""
    machine = PressedConnectorMachine()
    machine.add_one([3, 3, 4] * 10, SamplingParams(max_tokens=10, min_tokens=10))
    while not machine.scheduler.kv.num_used_blocks == 8:
        machine.answer()
        machine.schedule()
        if machine.flying:
            machine.update()
    machine.connector.known[str(len(machine.all))] = True  # Its lookup is answered at once.
    machine.add_one([i % 7 for i in range(22)], SamplingParams(max_tokens=4))
    plan = None
    while plan is None or not compactions_of(plan):
        machine.schedule()
        plan, _ = machine.flying[-1]
        machine.end_a_transfer(0, 1.0)
        machine.update()
    loads, _, _ = metadata_of(plan)
    read = set(range(1, 13)) - set(compactions_of(plan)[0].tables[0])
    assert read & set(loads[0].block_ids)
    machine.teardown()


def test_a_preempted_request_that_finds_more_than_its_prompt_is_compacted_a_plan_later() -> None:
    """In the plan with its start the worker still has the table of the slot's request before."""
    machine = RecompactingMachine()
    machine.add_one([0], SamplingParams(max_tokens=1))
    machine.add_one([i % 7 for i in range(22)], SamplingParams(max_tokens=12), siblings=2)
    machine.add_one([i % 7 for i in range(1, 31)], SamplingParams(max_tokens=4))
    machine.teardown()
    assert machine.scheduler.stats.num_preemptions


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
    run_machine(machine, 400)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_many_random_steps(machine: type[PriorityMachine]) -> None:
    run_machine(machine, NIGHTLY_STEPS)
