"""`KVCompressorKit`: whether a KV compressor scores every token of every head.

    class TestMine(KVCompressorKit):
        name = "mine"                               # as registered

The kit does not judge which tokens it keeps: that is the policy's.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from ...core.config import EngineConfig
from ...core.engine.async_engine import AsyncEngine
from ...core.protocols.attention import AttentionSpec
from ...core.protocols.kv_compressors import KVCompressor
from ...core.sampling_params import OutputKind, SamplingParams
from .kit import Kit

HEAD_DIM = 16


class KVCompressorKit(Kit):
    """Subclass it, and set the name."""

    kind = "kv_compressor"

    def make(self) -> KVCompressor:
        """Create the compressor as the worker does."""
        compressor: KVCompressor = self.registered()()
        return compressor

    def spec(self, num_kv_heads: int) -> AttentionSpec:
        """Return a layer that it serves."""
        spec = AttentionSpec(
            num_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM, scale=0.25
        )
        reason = self.registered().refusal(spec)
        assert reason is None or isinstance(reason, str), f"refusal() gives {reason!r}"
        if reason is not None:
            pytest.skip(f"it refuses plain attention: {reason}")
        return spec

    def scores(
        self, compressor: KVCompressor, spec: AttentionSpec, cache: torch.Tensor, seed: int = 0
    ) -> torch.Tensor:
        """Score as the worker does. cache: [2 (key, value), num_tokens, num_kv_heads, head_dim]"""
        keys, values = cache
        if not compressor.reads_values:
            values = values[:0]
        if not compressor.num_queries:
            return compressor.scores(spec, keys, values)
        draw = torch.Generator().manual_seed(seed)
        # After a prefix hit there may be fewer than it needs.
        count = min(compressor.num_queries, cache.shape[1] - seed % 2)
        queries = torch.randn(count, spec.num_heads, HEAD_DIM, generator=draw).to(cache.dtype)
        return compressor.scores(spec, keys, values, queries=queries)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("num_tokens", "num_kv_heads"), [(2, 2), (17, 1), (18, 3), (300, 2)])
    def test_every_token_of_every_head_has_a_score(
        self, num_tokens: int, num_kv_heads: int, dtype: torch.dtype
    ) -> None:
        """Also where all keys and values are equal or 0. None is NaN, which no order has."""
        spec, compressor = self.spec(num_kv_heads), self.make()
        shape = (2, num_tokens, num_kv_heads, HEAD_DIM)
        draw = torch.Generator().manual_seed(num_tokens)
        for cache in (torch.randn(shape, generator=draw), torch.ones(shape), torch.zeros(shape)):
            scores = self.scores(compressor, spec, cache.to(dtype), num_tokens)
            assert scores.shape == (num_tokens, num_kv_heads)
            assert not scores.isnan().any()

    def test_keys_and_values_are_read_and_not_changed(self) -> None:
        spec, compressor = self.spec(2), self.make()
        cache = torch.randn(2, 40, 2, HEAD_DIM, generator=torch.Generator().manual_seed(1))
        before = cache.clone()
        first = self.scores(compressor, spec, cache).clone()
        assert torch.equal(cache, before)
        self.scores(compressor, spec, torch.ones(2, 20, 2, HEAD_DIM))
        assert torch.equal(self.scores(compressor, spec, cache), first), "others' tokens matter"

    def test_requests_seen_before_do_not_matter(self) -> None:
        """Scores "depend on nothing else": one compressor serves all requests and layers, and gives
        each what one gives that has seen no other."""
        compressor = self.make()
        draw = torch.Generator().manual_seed(7)
        # The first may be kept: longer ones, larger numbers and more heads follow, and then it.
        sizes = [(24, 2, 1.0), (90, 2, 5.0), (24, 2, -0.2), (30, 3, 1.0), (24, 2, 1.0)]
        for seed, (num_tokens, num_kv_heads, factor) in enumerate(sizes):
            cache = torch.randn(2, num_tokens, num_kv_heads, HEAD_DIM, generator=draw) * factor
            spec = self.spec(num_kv_heads)
            alone = self.scores(self.make(), spec, cache, seed)
            assert torch.equal(self.scores(compressor, spec, cache, seed), alone)
            scores = alone.float()
            for count in (1, 17):
                chosen = scores.argsort(0, descending=True)[:count].sort(0)[0]
                merged = compressor.merged_values(spec, cache[0], cache[1], chosen)
                assert torch.equal(
                    merged, self.make().merged_values(spec, cache[0], cache[1], chosen)
                )

    @pytest.mark.parametrize("num_tokens", [17, 100])
    def test_scores_of_caches_are_those_of_copies(self, num_tokens: int) -> None:
        """If it reads caches itself; the blocks of others hold NaN."""
        spec, compressor, size = self.spec(2), self.make(), 8
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        draw = torch.Generator().manual_seed(num_tokens)
        columns = -(-num_tokens // size)
        blocks = torch.randperm(2 * columns, generator=draw)[:columns].int() + 1
        caches = [torch.full((2, 2 * columns + 1, size, 2, HEAD_DIM), torch.nan) for _ in range(3)]
        copies = torch.randn(3, 2, num_tokens, 2, HEAD_DIM, generator=draw)
        order = torch.arange(num_tokens)
        for cache, copy in zip(caches, copies, strict=True):
            cache[:, blocks[order // size].long(), order % size] = copy
        queries = torch.randn(3, compressor.num_queries, spec.num_heads, HEAD_DIM, generator=draw)
        more = {"queries": queries.to(device)} if compressor.num_queries else {}
        scores = compressor.cached_scores(
            spec, [cache.to(device) for cache in caches], blocks.to(device), num_tokens, **more
        )
        if scores is None:
            pytest.skip(f"{self.name} does not read caches here")
        assert scores.dtype == torch.float32
        for layer, (keys, values) in enumerate(copies):
            own = {"queries": queries[layer]} if more else {}
            expected = compressor.scores(spec, keys, values, **own).float().T
            torch.testing.assert_close(scores[layer].cpu(), expected, atol=1e-4, rtol=1e-3)

    @pytest.mark.parametrize("kept", [1, 16, 40])
    def test_merged_values_are_those_of_tokens_that_stay(self, kept: int) -> None:
        """As many, finite, and unchanged where nothing was dropped."""
        spec, compressor = self.spec(2), self.make()
        cache = torch.randn(2, 40, 2, HEAD_DIM, generator=torch.Generator().manual_seed(2))
        before = cache.clone()
        scores = self.scores(compressor, spec, cache)
        chosen = scores.float().argsort(0, descending=True)[:kept].sort(0)[0]
        merged = compressor.merged_values(spec, cache[0], cache[1], chosen)
        assert torch.equal(cache, before)
        assert merged.shape == (kept, 2, HEAD_DIM) and merged.isfinite().all()
        if kept == 40:
            torch.testing.assert_close(merged, cache[1])

    def test_an_engine_serves_with_it(self) -> None:
        """A long prompt is compacted, and the requests beside it are what they are alone."""
        draw = random.Random(5)
        prompts = [[draw.randrange(10, 1000) for _ in range(n)] for n in (60, 5, 14)]
        params = SamplingParams(
            temperature=0.0, max_tokens=8, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY
        )

        async def serve(name: str | None) -> list[list[int]]:
            compression: dict[str, Any] = {}
            if name is not None:
                compression = {"kv_compression": name, "kv_compression_ratio": 0.4}
            config = EngineConfig(
                device="cpu", dtype="float32", block_size=4, max_model_len=80, max_num_seqs=3,
                num_gpu_blocks_override=80, **compression,
            )  # fmt: skip

            async def generate(prompt: list[int]) -> list[int]:
                outputs = [output async for output in engine.generate(prompt, params)]
                assert outputs[-1].error is None, outputs[-1].error
                return outputs[-1].outputs[0].token_ids

            async with AsyncEngine(config, plugins=self.plugins()) as engine:
                results = list(await asyncio.gather(*map(generate, prompts)))
                assert engine.stats().kv_compactions == (0 if name is None else 1)
            return results

        async def compare() -> None:
            plain, compacted = await serve(None), await serve(self.name)
            assert compacted[1:] == plain[1:]
            assert compacted[0][0] == plain[0][0], "the first token follows the whole prompt"

        asyncio.run(compare())
