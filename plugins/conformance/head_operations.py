"""Checks of what stands beside attention, for `OperationsKit`: heads, their cache, encoders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ...core.nn.operations import CenteredNorm, HeadLayout, Norm
from ...core.nn.ragged import RaggedRows
from .operation_arguments import REFERENCE, wide


class HeadChecks:
    """Part of `OperationsKit`."""

    device: Any
    draw: Any
    make: Any
    near: Any
    norm: Any

    @pytest.mark.parametrize("heads", [(4, 2, 64), (3, 3, 80), (8, 1, 128)])
    @pytest.mark.parametrize("case", ["plain", "rotated", "normed", "both", "partly rotated"])
    def test_heads(self, case: str, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
        layout = HeadLayout(*heads)
        for tokens in (1, 7):
            qkv, *rest = self.projection(layout, tokens, case, dtype)
            want = REFERENCE.heads(qkv.float(), layout, *map(wide, rest))
            got = self.make(dtype).heads(qkv.clone(), layout, *rest)
            for name, one, other in zip(("query", "key", "value"), got, want, strict=True):
                assert one.dtype == dtype and one.shape == other.shape, name
                self.near(one, other, dtype, times=2)

    @pytest.mark.parametrize("heads", [(4, 2, 64), (5, 5, 80), (40, 8, 128)])
    @pytest.mark.parametrize("case", ["shared", "biased", "of each head"])
    def test_norm_heads(self, case: str, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
        """Queries and keys are normed where they are; values stay."""
        layout = HeadLayout(*heads)
        num_heads, num_kv_heads, dim = layout
        norms = []
        for count, eps in ((num_heads, 1e-5), (num_kv_heads, 1e-3)):
            size = (count, dim) if case == "of each head" else (dim,)
            bias = self.draw(dim, dtype=dtype) if case == "biased" else None
            norms.append(CenteredNorm(self.draw(*size, dtype=dtype), bias, eps))
        for tokens in (1, 7):
            width = (num_heads + 2 * num_kv_heads) * dim
            projection = self.draw(tokens, width, dtype=dtype) * 3 + 1
            want, got = projection.float(), projection.clone()
            REFERENCE.norm_heads(want, layout, *norms)
            self.make(dtype).norm_heads(got, layout, *norms)
            self.near(got, want, dtype, times=4)
            values = num_kv_heads * dim
            assert torch.equal(got[:, -values:], projection[:, -values:])

    def projection(self, layout: HeadLayout, tokens: int, case: str, dtype: torch.dtype) -> Any:
        """Return qkv, positions, cos_sin, query_norm, key_norm."""
        heads, kv_heads, dim = layout
        qkv = self.draw(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
        positions = torch.arange(tokens, device=self.device) * 5 + 3
        cos_sin = None
        if case != "plain" and case != "normed":
            rotary = dim // 2 if case == "partly rotated" else dim
            turns = 100.0 ** -torch.linspace(0, 1, rotary // 2)
            angles = torch.arange(64)[:, None] * turns
            cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.device)
        norms: list[Norm | None] = [None, None]
        if case in ("normed", "both"):
            norms = [self.norm(dim, dtype, seed=n) for n in (3, 4)]
        return qkv, positions, cos_sin, *norms

    @pytest.mark.parametrize("case", ["plain", "rotated", "both"])
    def test_cached_heads(self, case: str, dtype: torch.dtype) -> None:
        """Check what is written to the cache, and that nothing else of it changes."""
        layout = HeadLayout(4, 2, 64)
        projection = self.projection(layout, 5, case, dtype)
        got, want = self.cached(layout, projection, dtype, (1.0, 1.0))
        self.near(got, want, dtype, times=4)

    @pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
    def test_cached_heads_in_fp8(self, kind: str, dtype: torch.dtype) -> None:
        """Numbers are divided by the scales.

        fp8 represents all numbers exactly, so nothing depends on rounding.
        """
        layout, fp8 = HeadLayout(4, 2, 64), getattr(torch, kind)
        qkv, *rest = self.projection(layout, 5, "plain", dtype)
        qkv = (qkv * 2).round().clamp(-6, 6) / 2
        got, want = self.cached(layout, (qkv, *rest), fp8, (2.0**-3, 2.0**-5))
        assert torch.equal(got, want)

    def test_an_fp8_cache_is_cut_off_at_its_largest(self, dtype: torch.dtype) -> None:
        layout = HeadLayout(4, 2, 64)
        qkv, *rest = self.projection(layout, 5, "plain", dtype)
        qkv.fill_(1.0)
        qkv[1, ::7], qkv[2, ::5] = 96.0, -96.0
        got, want = self.cached(layout, (qkv, *rest), torch.float8_e4m3fn, (2.0**-3, 2.0**-5))
        assert torch.equal(got, want) and float(want.max()) == torch.finfo(torch.float8_e4m3fn).max

    def cached(
        self, layout: HeadLayout, given: Any, kind: torch.dtype, scales: tuple[float, float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cached numbers of the tokens, [2, tokens, ...] float32, and the expected
        ones."""
        slots = torch.tensor([9, 3, 30, 31, 0], device=self.device)
        empty = torch.full((2, 4, 8, 2, 64), 0.125, device=self.device).to(kind)
        caches = [empty.clone(), empty.clone()]
        qkv, *rest = given
        each: list[Any] = [self.make(qkv.dtype), REFERENCE]
        results = [
            operations.cached_heads(qkv.clone(), layout, *rest, cache, slots, scales)
            for operations, cache in zip(each, caches, strict=True)
        ]
        for one, other in zip(*results, strict=True):
            self.near(one, other, qkv.dtype, times=4)
        apart = empty.clone()
        each[0].write_cache(*(part.clone() for part in results[0][1:]), apart, slots, scales)
        assert torch.equal(apart.view(torch.uint8), caches[0].view(torch.uint8)), "write_cache"
        others = [n for n in range(32) if n not in slots.tolist()]
        after, before = (
            part.view(torch.uint8).flatten(1, 2)[:, others] for part in (caches[0], empty)
        )
        assert torch.equal(after, before), "slots of others were written"
        got, want = (cache.float().flatten(1, 2)[:, slots] for cache in caches)
        return got, want

    def test_bidirectional_attention(self, dtype: torch.dtype) -> None:
        """Attend to rows of different lengths in one step, each separately."""
        lengths = (5, 1, 17, 17, 3, 40)
        starts = np.cumsum([0, *lengths])
        parts = [self.draw(int(starts[-1]), 4, 32, dtype=dtype, seed=n) for n in range(3)]
        rows = RaggedRows.of(starts, self.device)
        query, key, value = (part.clone() for part in parts)
        got = self.make(dtype).bidirectional_attention(query, key, value, rows, 0.3)
        assert got.dtype == dtype
        for start, length in zip(starts, lengths, strict=False):
            own = slice(int(start), int(start) + length)
            query, key, value = (part[own].float().transpose(0, 1) for part in parts)
            weights = (query @ key.transpose(1, 2) * 0.3).softmax(-1)
            self.near(got[own], (weights @ value).transpose(0, 1), dtype, times=2)
