"""What a recorded step launches, and what a decode step sends: counted, so that neither grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launches import Launches

from jackfield import AsyncEngine, EngineConfig
from jackfield.core.nn.operations import Operations
from jackfield.core.step import StepPlan, TableWrite
from jackfield.core.worker.graphs.decode_graphs import HEADER, DecodeInputs, DecodeKey
from jackfield.core.worker.graphs.endings import Ending
from jackfield.core.worker.start.step_graphs import StepGraphs
from jackfield.core.worker.start.warmup import Warmup

from helpers import edit_json, interpreted, make_checkpoint

pytest.importorskip("triton")

LAYERS = 2
MODEL = {
    "_fused_decode_kernel": LAYERS, "_gated_activation_kernel": LAYERS,
    "_rms_norm_kernel": 2 * LAYERS + 1, "linear": 2 * LAYERS + 1, "addmm": 2 * LAYERS,
    "_embedding_kernel": 1,
}  # fmt: skip
"""A pass of a dense model, and its logits."""


KEPT_QUERIES = {"remainder": 1, "mul": 1, "add": 1}
"""Where the queries of a decode step go, for KV compressors that need them."""


@interpreted
@pytest.mark.parametrize("compression", [None, "window", "snap_kv"])
async def test_recorded_steps_launch_these_kernels_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    """KV compression adds none to a step, unless queries are kept: then a few, once per step."""
    monkeypatch.setattr(Warmup, "warm_up", lambda warmup: None)  # It takes the interpreter long.
    folder = make_checkpoint("qwen3", tmp_path)
    edit_json(
        folder / "config.json", num_hidden_layers=LAYERS, layer_types=["full_attention"] * LAYERS
    )
    config = EngineConfig(
        model=str(folder), load_format="dummy", device="cpu", dtype="float32",
        skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=8,
        block_size=8, operations="triton", attention_backend="triton", num_gpu_blocks_override=40,
        kv_compression=compression,
    )  # fmt: skip
    async with AsyncEngine(config) as engine:
        executor: Any = engine.core.executor
        worker = executor._worker

        def counted(step: Any) -> dict[str, int]:
            launches = Launches(monkeypatch)
            with launches:
                step()
            return dict(launches.counts)

        @torch.inference_mode()
        def steps() -> tuple[dict[str, int], ...]:
            graphs: Any = StepGraphs(worker.runner, lambda function: function, 8, worker.ranks)
            key = DecodeKey(4, Ending.PLAIN)
            graphs.decode.record(*key)
            smallest = graphs.mixed._smallest()
            graphs.mixed._run_once(smallest)
            return (
                counted(lambda: graphs.decode._step(key)),
                counted(lambda: graphs.mixed._step(smallest)),
            )

        decode, mixed = await executor._thread.call(steps)
        num_sent = await executor._thread.call(lambda: numbers_sent(worker.runner.batch))
    recorded = {**MODEL, "_decode_inputs_kernel": 1, "_part_kernel": 1, "_row_kernel": 1,
                "_written_tokens_kernel": 1}  # fmt: skip
    if compression == "snap_kv":
        assert decode == {**recorded, **KEPT_QUERIES}
        return
    assert decode == recorded
    assert mixed == {
        # Logits are a step of their own, with all that follows the last layer's attention.
        "_embedding_kernel": 1, "_gated_activation_kernel": LAYERS - 1,
        "_rms_norm_kernel": 2 * LAYERS - 1,
        "linear": 2 * LAYERS - 1, "addmm": 2 * LAYERS - 2,
        "_prefill_kernel": LAYERS, "_qk_norm_rope_cache_kernel": LAYERS,
        "_scatter_kernel": 1, "_step_inputs_kernel": 1, "_advance_kernel": 1,
        # The states are the last layer's input and its heads.
        "index_select": 2, "foreach_copy": 2,
    }  # fmt: skip
    assert num_sent == [2 * 4 + HEADER] * 3, "the third step has the numbers of the second"


def numbers_sent(batch: Any) -> list[int]:
    """Count the numbers that decode steps of three rows send in a graph of four: without a new
    block, with the same rows, and with a new block."""
    inputs = DecodeInputs(batch, Operations(), batch.num_slots)
    sizes: list[int] = []
    copy_into = batch.copy_into

    def counting(target: torch.Tensor, numbers: Any) -> None:
        sizes.append(len(numbers))
        copy_into(target, numbers)

    batch.copy_into = counting
    for table_writes in ((), (), (), (TableWrite(1, 0, 0, (5,)),)):
        plan = StepPlan(
            step=0, slots=(0, 1, 2), num_tokens=(1, 1, 1), samples=(True,) * 3,
            table_writes=table_writes,
        )  # fmt: skip
        assert inputs.fill(plan, 4)
    batch.copy_into = copy_into
    return sizes
