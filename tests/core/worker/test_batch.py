"""What the batch hands to kernels."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.step import SlotStart, StepPlan, TableWrite
from jackfield.core.worker.batch import UPLOADS_OF_STEP, PersistentBatch
from jackfield.core.worker.runner import ModelRunner

from helpers import make_checkpoint


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


async def test_the_ring_has_room_for_the_uploads_of_all_steps_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No buffer is rewritten while a copy still reads it: counted, as a CPU copies at once."""
    uploads: list[int] = []
    rings: set[int] = set()
    launch = ModelRunner.launch

    def counted_launch(runner: ModelRunner, *args: Any) -> Any:
        uploads.append(0)
        rings.add(runner.batch.num_staging)
        return launch(runner, *args)

    monkeypatch.setattr(ModelRunner, "launch", counted_launch)
    for name in ("upload", "copy_into"):
        real = getattr(PersistentBatch, name)

        def counted(batch: PersistentBatch, *args: Any, real: Any = real) -> Any:
            uploads[-1:] = [uploads[-1] + 1] if uploads else []
            return real(batch, *args)

        monkeypatch.setattr(PersistentBatch, name, counted)
    config = EngineConfig(
        model=str(make_checkpoint("qwen3", tmp_path)), device="cpu", dtype="float32",
        skip_tokenizer_init=True, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64,
        block_size=8, num_gpu_blocks_override=200, attention_backend="torch",
        kv_compression="key_norm", kv_compression_ratio=0.5,
    )  # fmt: skip
    async with AsyncEngine(config) as engine:

        async def one(number: int) -> None:
            params = SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False)
            async for _ in engine.generate([5 + number] * 100, params):
                pass

        await asyncio.gather(*map(one, range(6)))
        in_flight = engine.info.steps_in_flight
    (ring,) = rings
    assert max(uploads) >= 2
    assert ring > max(uploads) * in_flight


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_the_ring_grows_with_the_steps_in_flight(in_flight: int) -> None:
    batch = PersistentBatch(
        max_num_seqs=2, max_model_len=64, block_size=16, device=torch.device("cpu"),
        steps_in_flight=in_flight,
    )  # fmt: skip
    assert batch.num_staging > UPLOADS_OF_STEP * in_flight
