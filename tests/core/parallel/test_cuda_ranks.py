"""Ranks with a GPU each, in processes of their own."""

from __future__ import annotations

import gc
import json
import operator
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.step import PrepareAhead
from jackfield.core.worker.serving_process import freeze

from helpers import at_once, make_checkpoint

PROGRAM = Path(__file__).resolve().parent / "programs" / "cuda_rank.py"
SECONDS = 240.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("collectives", ["nccl", "peer_memory"])
def test_sums_are_alike_and_can_be_recorded(collectives: str) -> None:
    """Every rank has the same bits of each sum; a graph with sums is replayed among others."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    size = 2
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(size), str(port), collectives],
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size
    first, *others = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert all(other == first for other in others)
    assert first.pop("smallest") == 10
    flat = [
        part for value in first.values() for part in (value if isinstance(value, list) else [value])
    ]
    assert all(part is not False for part in flat), first


async def tokens(
    folder: Path, size: int, *, freezes: bool = False, **options: Any
) -> list[list[int]]:
    """Requests of several lengths, greedy and drawn, with steps recorded and not."""
    config = EngineConfig(
        model=str(folder), device="cuda", dtype="float32", max_model_len=256, max_num_seqs=8,
        num_gpu_blocks_override=200, skip_tokenizer_init=True, tensor_parallel_size=size,
        **options,
    )  # fmt: skip

    async def generate(engine: AsyncEngine, number: int) -> list[int]:
        prompt = [3 + (number * 7 + 11 * at) % 190 for at in range(5 + 23 * number)]
        params = SamplingParams(
            temperature=0.8 * (number % 2), seed=number, max_tokens=24, ignore_eos=True,
            detokenize=False, **({"top_k": 5} if number == 3 else {}),
        )  # fmt: skip
        async for output in engine.generate(prompt, params):
            last = output
        assert last.error is None, last.error
        return list(last.outputs[0].token_ids)

    async with AsyncEngine(config) as engine:
        for _ in range(40):
            if not await engine.core.executor.ask(PrepareAhead()):  # type: ignore[attr-defined]
                break
        if freezes:
            freeze()
        return await at_once(engine, *(generate(engine, number) for number in range(6)))


async def test_an_engine_whose_start_was_frozen_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """NCCL's end waits for all recorded steps that call it."""
    try:
        await tokens(make_checkpoint("qwen3", tmp_path), 2, freezes=True)
    finally:
        gc.unfreeze()
    assert not [each for each in caplog.records if "for ever" in each.message]


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
async def test_two_gpus_with_experts_of_their_own_serve_the_tokens_of_one(
    family: str, eager: bool, tmp_path: Path
) -> None:
    folder = make_checkpoint(family, tmp_path)
    one = await tokens(folder, 1, enforce_eager=eager)
    for backend in ("naive", "all_to_all"):
        options = {"enable_expert_parallel": True, "all2all_backend": backend}
        two = await tokens(folder, 2, enforce_eager=eager, **options)
        assert sum(map(operator.eq, one, two)) >= len(one) - 1, backend


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(("family", "copies"), [("qwen3-moe", 1), ("gpt-oss", 2)])
async def test_two_gpus_serve_the_tokens_of_one_while_experts_move(
    family: str, copies: int, eager: bool, tmp_path: Path
) -> None:
    """Steps are recorded before the first move, and replayed after each."""
    folder = make_checkpoint(family, tmp_path)
    one = await tokens(folder, 1, enforce_eager=eager)
    eplb = {"step_interval": 6, "window_size": 4, "num_redundant_experts": copies}
    two = await tokens(
        folder, 2, enforce_eager=eager, enable_expert_parallel=True, enable_eplb=True,
        eplb_config=eplb,
    )  # fmt: skip
    assert sum(map(operator.eq, one, two)) >= len(one) - 1


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
async def test_two_gpus_serve_the_tokens_of_one(family: str, eager: bool, tmp_path: Path) -> None:
    """GPUs round sums of other shapes otherwise, so one request may differ."""
    folder = make_checkpoint(family, tmp_path)
    one = await tokens(folder, 1, enforce_eager=eager)
    two = await tokens(folder, 2, enforce_eager=eager)
    assert sum(map(operator.eq, one, two)) >= len(one) - 1


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt-oss"])
async def test_two_stages_serve_the_tokens_of_one_gpu(
    family: str, eager: bool, tmp_path: Path
) -> None:
    """Recorded, the states of each stage are in static memory."""
    folder = make_checkpoint(family, tmp_path)
    one = await tokens(folder, 1, enforce_eager=eager)
    two = await tokens(folder, 1, enforce_eager=eager, pipeline_parallel_size=2)
    assert sum(map(operator.eq, one, two)) >= len(one) - 1


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
async def test_two_stages_of_two_gpus_serve_the_tokens_of_one(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    one = await tokens(folder, 1)
    four = await tokens(folder, 2, pipeline_parallel_size=2)
    assert sum(map(operator.eq, one, four)) >= len(one) - 1
