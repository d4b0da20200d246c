"""Positions of rows come from the device: any kind of step begins where the one before ended."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from jackfield import SamplingParams
from jackfield.core.nn.operations import Operations
from jackfield.core.step import NOTHING_IN_PROCESS, InProcess, SlotStart, StepPlan, TableWrite
from jackfield.core.worker.batch import PersistentBatch
from jackfield.core.worker.graphs.decode_graphs import DecodeInputs
from jackfield.core.worker.graphs.mixed_inputs import MixedInputs, MixedKey, shape_of
from jackfield.core.worker.per_slot import PerSlot, update_slots

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
    """With the blocks of their slots, whichever rows slots had before."""
    draw = random.Random(num_groups)
    batch = make_batch(num_groups)
    table, operations = batch.table, Operations()
    decode = DecodeInputs(batch, operations, SLOTS)
    mixed = MixedInputs(batch, SLOTS + 4)
    tokens: dict[int, list[int]] = {}
    blocks: dict[int, Any] = {}
    computed: dict[int, int] = {}
    num_blocks: dict[int, int] = {}
    kinds: Counter[str] = Counter()
    slots: list[int] = []
    for step in range(120):
        if not slots or draw.random() < 0.4:
            slots = draw.sample(range(SLOTS), draw.randrange(1, SLOTS + 1))
        starts, writes, counts = [], [], []
        for slot in slots:
            if slot not in tokens or computed[slot] + 8 > LENGTH:
                tokens[slot] = [draw.randrange(1, 999) for _ in range(LENGTH)]
                blocks[slot] = np.array(
                    [draw.sample(range(1, 500), LENGTH // BLOCK) for _ in range(num_groups)]
                )
                # Hits of the prefix cache.
                computed[slot], num_blocks[slot] = BLOCK * draw.randrange(3), 0
                starts.append(start(slot, tokens[slot], computed[slot]))
            counts.append(draw.randrange(1, 7) if starts or step % 5 == 0 else 1)
            have, need = num_blocks[slot], -(-(computed[slot] + counts[-1]) // BLOCK)
            num_blocks[slot] = max(have, need)
            writes += [
                TableWrite(slot, group, have, tuple(blocks[slot][group, have:need].tolist()))
                for group in range(num_groups)
                if need > have
            ]
        plan = StepPlan(
            step=step, slots=tuple(slots), num_tokens=tuple(counts), samples=(True,) * len(slots),
            starts=tuple(starts), table_writes=tuple(writes),
        )  # fmt: skip
        if not starts and set(counts) == {1} and decode.fill(plan, SLOTS):
            kinds["decode"] += 1
            kinds["copied rows"] += int((decode._numbers.array[: len(slots)] >= 0).sum())
            kinds["kept rows"] += int((decode._numbers.array[: len(slots)] < 0).sum())
            inputs = decode.expand(SLOTS)
        elif step % 2:
            kinds["mixed"] += 1
            written = table.writes(plan)
            rows = batch.rows(plan)
            mixed.fill(rows, written, shape_of(rows), MixedKey(SLOTS, 40))
            mixed.write(mixed.key)
            inputs = mixed.expand(mixed.key, SLOTS + 4)
        else:
            kinds["launched"] += 1
            inputs = batch.apply(plan)
        expected = [
            computed[s] + n for s, count in zip(slots, counts, strict=True) for n in range(count)
        ]
        owners = [s for s, count in zip(slots, counts, strict=True) for _ in range(count)]
        assert inputs.positions[: len(expected)].tolist() == expected
        assert inputs.input_ids[: len(expected)].tolist() == [
            tokens[s][at] for s, at in zip(owners, expected, strict=True)
        ]
        for group, layout in enumerate(inputs.layouts):
            assert layout.slot_mapping[: len(expected)].tolist() == [
                blocks[s][group, at // BLOCK] * BLOCK + at % BLOCK
                for s, at in zip(owners, expected, strict=True)
            ]
            for row, slot in enumerate(slots):
                needed = num_blocks[slot]
                wanted = blocks[slot][group, :needed].tolist()
                assert layout.block_table[row, :needed].tolist() == wanted
        for slot, count in zip(slots, counts, strict=True):
            computed[slot] += count
        assert inputs.layout.seq_lens[: len(slots)].tolist() == [computed[s] for s in slots]
        assert {slot: int(table.lengths[slot]) for slot in computed} == computed
        if step % 3 == 0:  # Between reads, bounds may lag.
            assert {slot: int(table.length_bounds[slot]) for slot in computed} == computed
        assert int(table.lengths[batch.scratch_slot]) == 0
    assert all(kinds[kind] > 4 for kind in ("decode", "mixed", "launched")), kinds
    assert kinds["kept rows"] > 9 and kinds["copied rows"] > 9, kinds


@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_steady_decode_step_copies_no_table(num_groups: int) -> None:
    """What it writes to tables is the new blocks, into a slot's and into its row's."""
    batch = make_batch(num_groups)
    decode = DecodeInputs(batch, Operations(), SLOTS)
    slots = (2, 0, 3)
    batch.write(
        StepPlan(
            step=0, slots=(), num_tokens=(), samples=(),
            starts=tuple(start(slot, [1] * 5, 5) for slot in slots),
            table_writes=tuple(
                TableWrite(slot, group, 0, (slot + 1, slot + 5))
                for slot in slots for group in range(num_groups)
            ),
        )
    )  # fmt: skip

    def copied(*table_writes: TableWrite) -> list[bool]:
        """Return which rows of a step of three rows, and two of padding, are copied."""
        plan = StepPlan(
            step=1, slots=slots, num_tokens=(1,) * 3, samples=(True,) * 3,
            table_writes=table_writes,
        )  # fmt: skip
        assert decode.fill(plan, SLOTS)
        layouts = decode.expand(SLOTS).layouts
        for group, layout in enumerate(layouts):
            columns = slice(group * batch.table.columns, (group + 1) * batch.table.columns)
            for row, slot in enumerate(slots):
                table = batch.table.block_table[slot, columns]
                assert torch.equal(layout.block_table[row], table)
        return (decode._numbers.array[:SLOTS] >= 0).tolist()

    assert copied() == [True] * 5
    assert copied() == copied() == [False] * 5
    new = [TableWrite(0, group, 2, (30 + group,)) for group in range(num_groups)]
    assert copied(*new) == [False] * 5
    batch.write(StepPlan(2, (), (), (), table_writes=(TableWrite(3, 0, 2, (40,)),)))
    assert copied() == [False, False, True, False, False]
    decode.fill_scratch(2)
    assert copied() == [True] * 5


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
    update_slots((Part("a"), Part("b")), plan, beside)
    assert heard == [
        (name, kind, slot)
        for kind, slot in (("release", 2), ("release", 1), ("start", 1), ("start", 0))
        for name in "ab"
    ]
