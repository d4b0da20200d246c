"""What the batch hands to kernels."""

from __future__ import annotations

import torch

from jackfield import SamplingParams
from jackfield.core.step import SlotStart, StepPlan, TableWrite
from jackfield.core.worker.batch import PersistentBatch


def start(slot: int, tokens: int) -> SlotStart:
    return SlotStart(
        slot=slot,
        request_id=str(slot),
        token_ids=tuple(range(tokens)),
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        params=SamplingParams(),
        seed=0,
    )


def test_pointers_that_kernels_read_are_aligned_for_any_number_of_rows() -> None:
    """Triton compiles a kernel for aligned pointers, and again for others."""
    for rows in range(1, 9):
        batch = PersistentBatch(
            max_num_seqs=8, max_model_len=64, block_size=16, device=torch.device("cpu")
        )
        plan = StepPlan(
            step=0,
            slots=tuple(range(rows)),
            num_tokens=(3,) * rows,
            samples=(True,) * rows,
            starts=tuple(start(slot, 3) for slot in range(rows)),
            table_writes=tuple(TableWrite(slot, 0, 0, (slot + 1,)) for slot in range(rows)),
        )
        inputs = batch.apply(plan)
        layout = inputs.layout
        assert layout.query_start.tolist() == [3 * row for row in range(rows + 1)]
        for name in ("query_start", "seq_lens", "block_table", "slot_mapping"):
            assert getattr(layout, name).data_ptr() % 16 == 0, (name, rows)
        for name in ("input_ids", "positions", "sample_slots", "sample_lengths"):
            assert getattr(inputs, name).data_ptr() % 16 == 0, (name, rows)


def test_a_plan_without_rows_changes_its_slots() -> None:
    def batch() -> PersistentBatch:
        return PersistentBatch(
            max_num_seqs=2, max_model_len=64, block_size=16, device=torch.device("cpu")
        )

    changes = {"starts": (start(1, 5),), "table_writes": (TableWrite(1, 0, 0, (7,)),)}
    rows = ((1,), (5,), (True,))
    whole, parts = batch(), batch()
    expected = whole.apply(StepPlan(0, *rows, **changes))
    parts.write(StepPlan(0, (), (), (), **changes))
    parts.write(StepPlan(1, (), (), ()))
    actual = parts.apply(StepPlan(2, *rows))
    assert actual.input_ids.tolist() == expected.input_ids.tolist() == list(range(5))
    assert actual.layout.slot_mapping.tolist() == expected.layout.slot_mapping.tolist()
    assert torch.equal(parts.table.storage[:-1], whole.table.storage[:-1])
