"""What ranks compute while experts move between them, for tests of layers, formats and engines."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import forked
import torch

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.remote import processes
from jackfield.core.worker.expert_balance import ExpertMover
from jackfield.plugins.conformance.paged_model import PagedModel, assert_near
from jackfield.plugins.conformance.rank_threads import run_ranks, thread_ranks

from helpers import at_once


def two_ranks(folder: Path, copies: int, **options: Any) -> tuple[list[PagedModel], Any]:
    """Return the models of two ranks, and their movers."""
    ranks = thread_ranks(2, expert_parallel=True)
    models = [
        PagedModel(
            folder, "float32", ranks=rank, tensor_parallel_size=2, enable_expert_parallel=True,
            enable_eplb=True, eplb_config={"num_redundant_experts": copies}, **options,
        )
        for rank in ranks
    ]  # fmt: skip
    movers = run_ranks([
        functools.partial(ExpertMover, model.model, rank.tensor, model.device)
        for model, rank in zip(models, ranks, strict=True)
    ])  # fmt: skip
    return models, movers


def check_moves(folder: Path, copies: int, **options: Any) -> None:
    """Compare with what ranks, and without quantization one rank, compute before experts move."""
    models, movers = two_ranks(folder, copies, **options)
    prompt = [5 + number % 140 for number in range(0, 310, 11)]

    def run(slot: int) -> list[torch.Tensor]:
        row = {slot: prompt}
        return [r[slot] for r in run_ranks([functools.partial(m.run, row) for m in models])]

    want = run(3)[0]
    # On a GPU, products in 8 bits round their inputs: what differs by little may be rounded apart.
    bound = 0.1 if options and models[0].device.type == "cuda" else 2e-4
    if not options:
        assert_near(PagedModel(folder, "float32").run({0: prompt})[0], want, 2e-4)
    for number in range(3):
        for mover in movers:
            for balance, _ in mover.layers:
                # As if all tokens had chosen what one rank alone has.
                own, other = (balance.placement[rank] for rank in (number % 2, 1 - number % 2))
                balance.loads.zero_()
                balance.loads[[expert for expert in own if expert not in other][:2]] = 50
        with torch.inference_mode():
            moved = run_ranks([mover.move for mover in movers])
        assert moved[0] == moved[1] > 0
        for balance, _ in movers[0].layers:
            assert int(balance.loads.sum()) == 0
        for result in run(number):
            assert_near(result, want, bound)
        counted = [balance.loads.tolist() for mover in movers for balance, _ in mover.layers]
        half = len(counted) // 2
        assert counted[:half] == counted[half:], "ranks have counted unlike tokens"
        assert sum(counted[0]) >= len(prompt) and sum(counted[0]) % len(prompt) == 0


async def tokens_of_requests(folder: Path, max_tokens: int, **options: Any) -> list[list[int]]:
    """Serve requests of several lengths at once, greedy and drawn → the tokens of each"""
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", max_model_len=128, max_num_seqs=4,
        max_num_batched_tokens=32, num_gpu_blocks_override=64, skip_tokenizer_init=True,
        **options,
    )  # fmt: skip

    async def generate(engine: AsyncEngine, number: int) -> list[int]:
        prompt = [3 + (number * 7 + 11 * at) % 140 for at in range(2 + 19 * number)]
        params = SamplingParams(
            temperature=0.7 * (number % 2), seed=number, max_tokens=max_tokens, ignore_eos=True,
            detokenize=False,
        )  # fmt: skip
        async for output in engine.generate(prompt, params):
            last = output
        assert last.error is None, last.error
        return list(last.outputs[0].token_ids)

    with forked.processes_of(processes):
        async with AsyncEngine(config) as engine:
            return await at_once(engine, *(generate(engine, number) for number in range(5)))
