"""Positions of rows come from the device: any kind of step begins where the one before ended."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from jackfield import SamplingParams
from jackfield.core.nn.operations import Operations
from jackfield.core.step import NOTHING_IN_PROCESS, InProcess, SlotStart, StepPlan, TableWrite
from jackfield.core.worker.batch import PersistentBatch
from jackfield.core.worker.graphs import DecodeInputs
from jackfield.core.worker.mixed_graphs import MixedInputs, MixedKey, _shape
from jackfield.core.worker.parts import PerSlot, update_parts

SLOTS, LENGTH, BLOCK = 5, 48, 4


def make_batch(num_groups: int = 1) -> PersistentBatch:
    return PersistentBatch(
        max_num_seqs=SLOTS, max_model_len=LENGTH, block_size=BLOCK, device=torch.device("cpu"),
        num_groups=num_groups,
    )  # fmt: skip


def start(slot: int, tokens: list[int], computed: int) -> SlotStart:
    return SlotStart(
        slot=slot, request_id=str(slot), token_ids=tuple(tokens), num_prompt_tokens=len(tokens),
        num_computed_tokens=computed, params=SamplingParams(), seed=0,
    )  # fmt: skip


@pytest.mark.parametrize("num_groups", [1, 2])
def test_rows_begin_where_earlier_steps_of_any_kind_ended(num_groups: int) -> None:
    draw = random.Random(num_groups)
    batch = make_batch(num_groups)
    table, operations = batch.table, Operations()
    decode = DecodeInputs(batch, operations, SLOTS)
    mixed = MixedInputs(batch, SLOTS + 4)
    blocks = np.arange(1, 1 + SLOTS * num_groups * table.columns).reshape(SLOTS, num_groups, -1)
    tokens: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    kinds = set()
    for step in range(60):
        slots = sorted(draw.sample(range(SLOTS), draw.randrange(1, SLOTS + 1)))
        starts, writes, counts = [], [], []
        for slot in slots:
            if slot not in tokens or computed[slot] + 8 > LENGTH:
                tokens[slot] = [draw.randrange(1, 999) for _ in range(LENGTH)]
                # Hits of the prefix cache.
                computed[slot] = BLOCK * draw.randrange(3)
                starts.append(start(slot, tokens[slot], computed[slot]))
                writes += [
                    TableWrite(slot, group, 0, tuple(blocks[slot, group].tolist()))
                    for group in range(num_groups)
                ]
            counts.append(1 if step % 3 and not starts else draw.randrange(1, 7))
        plan = StepPlan(
            step=step, slots=tuple(slots), num_tokens=tuple(counts), samples=(True,) * len(slots),
            starts=tuple(starts), table_writes=tuple(writes),
        )  # fmt: skip
        if not starts and set(counts) == {1} and decode.fill(plan, SLOTS):
            kinds.add("decode")
            inputs = decode.expand(SLOTS)
        elif step % 2:
            kinds.add("mixed")
            written = table.writes(plan)
            rows = batch.rows(plan)
            mixed.fill(rows, written, _shape(rows), MixedKey(SLOTS, 40))
            mixed.write(mixed.key)
            inputs = mixed.expand(mixed.key, SLOTS + 4)
        else:
            kinds.add("launched")
            inputs = batch.apply(plan)
        expected = [computed[s] + n for s, count in zip(slots, counts, strict=True)
                    for n in range(count)]  # fmt: skip
        owners = [s for s, count in zip(slots, counts, strict=True) for _ in range(count)]
        assert inputs.positions[: len(expected)].tolist() == expected
        assert inputs.input_ids[: len(expected)].tolist() == [
            tokens[s][at] for s, at in zip(owners, expected, strict=True)
        ]
        for group, layout in enumerate(inputs.layouts):
            assert layout.slot_mapping[: len(expected)].tolist() == [
                blocks[s, group, at // BLOCK] * BLOCK + at % BLOCK
                for s, at in zip(owners, expected, strict=True)
            ]
        for slot, count in zip(slots, counts, strict=True):
            computed[slot] += count
        assert inputs.layout.seq_lens[: len(slots)].tolist() == [computed[s] for s in slots]
        known = {slot: int(table.lengths[slot]) for slot in computed}
        assert known == computed == {slot: int(table.length_bounds[slot]) for slot in computed}
        assert int(table.lengths[batch.scratch_slot]) == 0
    assert kinds == {"decode", "mixed", "launched"}


def test_a_decode_step_takes_the_block_of_its_token_and_leaves_others_to_a_launch() -> None:
    batch = make_batch()
    decode = DecodeInputs(batch, Operations(), SLOTS)
    batch.apply(
        StepPlan(
            step=0, slots=(0, 1), num_tokens=(BLOCK, 3), samples=(True, True),
            starts=(start(0, [1] * BLOCK, 0), start(1, [2] * 3, 0)),
            table_writes=(TableWrite(0, 0, 0, (7,)), TableWrite(1, 0, 0, (9,))),
        )
    )  # fmt: skip

    def plan(*table_writes: TableWrite) -> StepPlan:
        return StepPlan(
            step=1, slots=(0, 1), num_tokens=(1, 1), samples=(True, True),
            table_writes=table_writes,
        )  # fmt: skip

    for other in (
        TableWrite(0, 0, 2, (5,)),
        TableWrite(0, 0, 1, (5, 6)),
        TableWrite(1, 0, 1, (5,)),
        TableWrite(3, 0, 0, (5,)),
    ):
        assert not decode.fill(plan(other), 4)
    assert decode.fill(plan(TableWrite(0, 0, 1, (5,))), 4)
    inputs = decode.expand(4)
    assert inputs.layout.slot_mapping.tolist() == [5 * BLOCK, 9 * BLOCK + 3, 0, 0]
    assert batch.table.block_table[:2, :2].tolist() == [[7, 5], [9, 0]]
    assert inputs.layout.block_table[:2, :2].tolist() == [[7, 5], [9, 0]]


def test_every_part_hears_of_released_slots_before_those_that_start() -> None:
    heard: list[tuple[str, str, int]] = []

    class Part(PerSlot):
        def __init__(self, name: str) -> None:
            self.name = name

        def start(self, start: SlotStart, in_process: InProcess = NOTHING_IN_PROCESS) -> None:
            assert in_process is beside
            heard.append((self.name, "start", start.slot))

        def release(self, slot: int) -> None:
            heard.append((self.name, "release", slot))

    beside = InProcess({})
    plan = StepPlan(
        step=0, slots=(), num_tokens=(), samples=(), released=(2, 1),
        starts=(start(1, [5], 0), start(0, [6], 0)),
    )  # fmt: skip
    update_parts((Part("a"), Part("b")), plan, beside)
    assert heard == [
        (name, kind, slot)
        for kind, slot in (("release", 2), ("release", 1), ("start", 1), ("start", 0))
        for name in "ab"
    ]
