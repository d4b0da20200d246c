"""A thousand requests that end in every way there is leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jackfield import AsyncEngine, EngineConfig, OutputKind, SamplingParams
from jackfield.core.engine.output import OutputStream, RequestState
from jackfield.core.scheduling.request import Request

from helpers import VOCAB, make_checkpoint

REQUESTS = 1000
AT_ONCE = 24
"""More than there are slots (16), so that some wait."""
GROWTH_MIB = 6.0
"""What the second half of the requests may add to the resident memory: 12 KiB a request.

Measured: 0.1 MiB.
"""
WAYS = ("finish", "finish", "break", "cancel", "abort", "abandon before the first token")


def resident_mib() -> float:
    """Resident memory after a collection, with the allocator's free pages given back."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def alive() -> int:
    """How many requests and streams something still holds."""
    gc.collect()
    kinds = (RequestState, OutputStream, Request)
    return sum(type(thing) in kinds for thing in gc.get_objects())


class Traffic:
    """Requests of random shape; each ends in one of WAYS, and `ended` counts how."""

    def __init__(self, engine: AsyncEngine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.ended: Counter[str] = Counter()
        self._prefix = [self.random.randrange(3, VOCAB) for _ in range(40)]

    def params(self) -> SamplingParams:
        pick = self.random
        return SamplingParams(
            n=pick.choice((1, 1, 1, 2)),
            max_tokens=pick.randint(1, 24),
            stop_token_ids=tuple(range(3, pick.choice((3, 3, 60)))),
            temperature=pick.choice((0.0, 1.0)),
            top_p=pick.choice((1.0, 0.9)),
            repetition_penalty=pick.choice((1.0, 1.2)),
            logprobs=pick.choice((None, None, 3)),
            seed=pick.choice((None, 5)),
            output_kind=pick.choice(list(OutputKind)),
        )

    def prompt(self) -> list[int]:
        shared = self._prefix[: self.random.choice((0, 16, 40))]
        length = self.random.randint(1, 40)
        return shared + [self.random.randrange(3, VOCAB) for _ in range(length)]

    async def one(self, number: int) -> None:
        way = self.random.choice(WAYS)
        name = f"request-{number}"
        leave_after = self.random.randint(1, 6)
        stream = self.engine.generate(self.prompt(), self.params(), request_id=name)

        async def consume() -> Any:
            seen, last = 0, None
            async for output in stream:
                seen, last = seen + 1, output
                if way == "break" and seen >= leave_after:
                    break
                if way == "abort" and seen == leave_after:
                    await self.engine.abort(name)
            return last

        task = asyncio.ensure_future(consume())
        if way == "cancel":
            await asyncio.wait([task], timeout=self.random.random() * 0.05)
        elif way == "abandon before the first token":
            for _ in range(leave_after):
                await asyncio.sleep(0)
        if way in ("cancel", "abandon before the first token"):
            task.cancel()
        outputs = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outputs[0], asyncio.CancelledError):
            self.ended["cancelled"] += 1
        elif isinstance(outputs[0], BaseException):
            raise outputs[0]
        elif not outputs[0].finished:
            self.ended["left"] += 1
        else:
            self.ended.update({c.finish_reason for c in outputs[0].outputs})

    async def run(self, count: int) -> None:
        numbers = iter(range(count))

        async def caller() -> None:
            for number in numbers:
                await self.one(number)

        await asyncio.gather(*(caller() for _ in range(AT_ONCE)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_thousand_requests_that_end_in_every_way_leave_nothing_behind(
    tmp_path: Path,
) -> None:
    config = EngineConfig(
        model=str(make_checkpoint("qwen3", tmp_path)),
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend="torch",
        max_model_len=128,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        block_size=8,
        num_gpu_blocks_override=60,
    )
    alive_before = alive()
    async with AsyncEngine(config) as engine:
        traffic = Traffic(engine, seed=1)
        sizes = []
        for _ in range(2):
            await traffic.run(REQUESTS // 2)
            gc.collect()
            stats = engine.stats()
            assert (
                stats.kv_blocks_used,
                stats.num_requests_running,
                stats.num_requests_waiting,
            ) == (0, 0, 0)
            assert alive() == alive_before
            sizes.append(resident_mib())
        ended = traffic.ended
        for way in ("length", "stop", "abort", "left", "cancelled"):
            assert ended[way] > 20, f"too few requests ended this way: {way}, {ended}"
        assert sum(stats.requests_finished.values()) >= REQUESTS * 0.8
        assert stats.num_preemptions > 0, "the cache was too large to force a preemption"
        assert sizes[1] - sizes[0] < GROWTH_MIB, f"resident memory grew: {sizes} MiB"
        assert await engine.reset_prefix_cache(), "blocks are held though nothing runs"
