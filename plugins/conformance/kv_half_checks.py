"""Checks of a KV connector's two halves without an engine: what they move, and what they leave."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ...core.config import Device
from .kv_halves import BLOCK, SECONDS, Halves, bits, random_cache

LATE_SECONDS = 0.3
"""Delay after a worker half has closed, in which later writes are detected."""


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a test's scenario; one that hangs fails."""
    asyncio.run(asyncio.wait_for(scenario, 3 * SECONDS))


class HalfChecks:
    """A part of `KVConnectorKit`."""

    device: ClassVar[Device]
    is_shared: bool
    """Whether other halves find what was saved."""

    def halves(self, folder: Path, caches: list[torch.Tensor]) -> Halves:
        """Create both halves over these caches."""
        raise NotImplementedError

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_what_is_saved_comes_back_bit_equal(self, dtype: torch.dtype, tmp_path: Path) -> None:
        shapes = ((2, 8), (1, 4))
        saved = [
            random_cache(14, BLOCK, heads, dim, dtype).to(self.device) for heads, dim in shapes
        ]

        async def scenario() -> None:
            keys = [bytes([n]) * 32 for n in (7, 8, 9)]
            halves = self.halves(tmp_path, saved)
            assert await halves.found(keys) == 0
            await halves.save(keys, [3, 12, 1])
            caches = saved
            if self.is_shared:
                halves.close()
                caches = [torch.zeros_like(cache) for cache in saved]
                halves = self.halves(tmp_path, caches)
            assert await halves.found(keys) == 3 * BLOCK
            assert await halves.found([keys[0], b"other" * 6 + b"!!", keys[2]]) == BLOCK
            before = [cache.clone() for cache in caches]
            expected = [cache[:, [3, 12, 1]].clone() for cache in saved]
            assert await halves.load(keys, [5, 6, 11]) == ()
            halves.close()
            for cache, old, new in zip(caches, before, expected, strict=True):
                assert torch.equal(bits(cache[:, [5, 6, 11]]), bits(new))
                others = [n for n in range(14) if n not in (5, 6, 11)]
                assert torch.equal(bits(cache[:, others]), bits(old[:, others]))

        run(scenario())

    def test_blocks_that_are_not_there_are_reported_and_the_transfer_ends(
        self, tmp_path: Path
    ) -> None:
        caches = [random_cache(8, BLOCK, 2, 8, torch.float32).to(self.device)]

        async def scenario() -> None:
            halves = self.halves(tmp_path, caches)
            keys = [b"a" * 32, b"b" * 32]
            await halves.save(keys[:1], [1])
            assert await halves.found(keys) == BLOCK
            assert set(await halves.load(keys, [2, 3])) == {3}
            halves.close()

        run(scenario())

    def test_a_worker_half_that_is_closed_leaves_the_cache_alone(self, tmp_path: Path) -> None:
        """Close in the middle of a load, from another thread: the engine then frees its blocks."""
        caches = [random_cache(8, BLOCK, 2, 8, torch.float32).to(self.device)]

        async def scenario() -> None:
            halves = self.halves(tmp_path, caches)
            keys = [b"a" * 32, b"b" * 32]
            await halves.save(keys, [1, 2])
            await halves.begin_load(keys, [3, 4])
            await asyncio.to_thread(halves.worker.close)
            if self.device == "cuda":
                torch.cuda.synchronize()
            before = [bits(cache.clone()) for cache in caches]
            await asyncio.sleep(LATE_SECONDS)
            halves.scheduler.close()
            for cache, was in zip(caches, before, strict=True):
                assert torch.equal(bits(cache), was), "it writes to the cache after its end"

        run(scenario())
