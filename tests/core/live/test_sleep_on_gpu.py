"""Sleep on a GPU: recorded steps outlive it, and another program sees the memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import InvalidRequest

from helpers import make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPT = list(range(3, 30))
GIB = 1 << 30


def free_bytes() -> int:
    """Return what another process could have."""
    script = "import torch; print(torch.cuda.mem_get_info()[0])"
    command = [sys.executable, "-c", script]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


async def said(engine: AsyncEngine) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    async for output in engine.generate(PROMPT, params):
        last = output
    assert last.error is None, last.error
    return list(last.outputs[0].token_ids)


@pytest.mark.parametrize("eager", [False, True])
async def test_recorded_steps_outlive_a_sleep(eager: bool, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    config = EngineConfig(
        model=str(folder), device="cuda", dtype="float32", skip_tokenizer_init=True,
        max_model_len=128, max_num_seqs=4,
        num_gpu_blocks_override=1 << 18, enable_sleep_mode=True, enforce_eager=eager,
    )  # fmt: skip
    async with AsyncEngine(config) as engine:
        want = await said(engine)
        worker: Any = engine.core.executor._worker  # type: ignore[attr-defined]
        memory = worker._weights.memory
        places = [storage.data_ptr() for each in memory._storages.values() for storage in each]
        size = sum(map(sum, memory._sizes.values()))
        assert size > GIB
        if not eager:
            assert worker.runner.decode.graphs.num_recorded
        for level in (1, 2, 1):
            before = free_bytes()
            answer = await engine.sleep(level)
            assert answer["freed_bytes"] >= size
            # Others may take some of it at once.
            assert free_bytes() - before > 0.5 * size
            await engine.wake_up(["weights"])
            await engine.wake_up()
            assert await said(engine) == want
        storages = [storage.data_ptr() for each in memory._storages.values() for storage in each]
        assert storages == places
        await engine.update_weights(folder)
        assert await said(engine) == want


async def test_sleep_with_recorded_steps_names_the_option(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    config = EngineConfig(
        model=str(folder), device="cuda", dtype="float32", skip_tokenizer_init=True,
        max_model_len=128, max_num_seqs=4, num_gpu_blocks_override=400,
    )  # fmt: skip
    async with AsyncEngine(config) as engine:
        want = await said(engine)
        with pytest.raises(InvalidRequest, match="enable_sleep_mode"):
            await engine.sleep()
        assert await said(engine) == want
