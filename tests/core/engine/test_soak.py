"""Hundreds of requests that end in every way there is leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from pathlib import Path

import pytest

from jackfield import AsyncEngine, EngineConfig, OutputKind, SamplingParams
from jackfield.core.engine.output_stream import OutputStream
from jackfield.core.engine.request_state import RequestState
from jackfield.core.request import Request

from helpers import VOCAB

AT_ONCE = 40
GROWTH = 12 << 10
"""Bytes that each request of the second half may add to the resident memory. Measured: 0.2 KiB."""


def resident_bytes() -> int:
    """Of this process, from the kernel."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def alive() -> int:
    """How many requests and streams something still holds."""
    gc.collect()
    kinds = (RequestState, OutputStream, Request)
    return sum(type(thing) in kinds for thing in gc.get_objects())


async def one(engine: AsyncEngine, number: int, draw: random.Random) -> str:
    """Run one request to some end. → how it ended"""
    end = draw.choice(["whole", "whole", "cancel", "break", "abort", "two", "stop"])
    shared = [7] * 16 * draw.randrange(3)
    prompt = shared + [draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 50))]
    params = SamplingParams(
        max_tokens=draw.randrange(1, 25),
        n=2 if end == "two" else draw.choice([1, 1, 1, 2]),
        temperature=draw.choice([0.0, 0.8]),
        repetition_penalty=draw.choice([1.0, 1.2]),
        logprobs=draw.choice([None, None, 3]),
        stop_token_ids=tuple(range(3, 60)) if end == "stop" else (),
        seed=number,
        ignore_eos=True,
        detokenize=False,
        output_kind=draw.choice([OutputKind.CUMULATIVE] * 3 + [OutputKind.FINAL_ONLY]),
    )
    name = f"soak-{number}"
    patience = draw.randrange(4)

    async def read() -> int:
        steps = 0
        async for out in engine.generate(prompt, params, request_id=name):
            steps += 1
            if end == "break" and steps > patience:
                break
            if end == "abort" and steps > patience:
                await engine.abort(name)
            if out.finished:
                assert all(c.finish_reason for c in out.outputs)
                if end in ("whole", "two"):
                    lengths = [len(c.token_ids) for c in out.outputs]
                    assert lengths == [params.max_tokens] * params.n
        return steps

    if end != "cancel":
        await read()
        return end
    task = asyncio.create_task(read())
    await asyncio.sleep(draw.random() * 0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return end


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
async def test_many_requests_leave_nothing_behind(count: int) -> None:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        attention_backend="torch",
        max_model_len=160,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=24,
    )
    draw = random.Random(0)
    ends: set[str] = set()
    alive_before = alive()
    async with AsyncEngine(config) as engine:
        gate = asyncio.Semaphore(AT_ONCE)

        async def gated(number: int) -> None:
            async with gate:
                ends.add(await one(engine, number, draw))

        memory = []
        for half in range(2):
            first = half * count // 2
            await asyncio.gather(*(gated(first + n) for n in range(count // 2)))
            assert await engine.reset_prefix_cache(), "a block is held though nothing runs"
            stats = engine.stats()
            assert stats.kv_blocks_used == 0
            assert stats.num_requests_running == 0 and stats.num_requests_waiting == 0
            assert alive() == alive_before
            memory.append(resident_bytes())
        assert engine.stats().num_preemptions > 0, "the cache is small enough to force some"
        assert ends == {"whole", "cancel", "break", "abort", "two", "stop"}
        assert set(stats.requests_finished) == {"length", "stop", "abort"}
        assert memory[1] - memory[0] < GROWTH * count // 2
        # What one more request computes is right after all that.
        again = [
            [o.outputs[0].token_ids async for o in engine.generate([5, 6, 7], params)][-1]
            for params in [SamplingParams(max_tokens=8, detokenize=False, ignore_eos=True)] * 2
        ]
        assert len(again[0]) == 8
