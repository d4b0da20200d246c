"""Scores of tokens where they are cached, against the compressors' own over copies."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.core.cache.formats import QUANTIZED_FORMATS
from jackfield.core.nn.kv_cache.quantized_cache import (
    KVCache,
    QuantizedCache,
    read_keys,
    read_values,
    write_blocks,
)
from jackfield.core.protocols.attention import AttentionSpec
from jackfield.kernels.compaction import query_scores
from jackfield.plugins.kv_compressors.by_keys import KeyDiff, KeyNorm, Window
from jackfield.plugins.kv_compressors.by_queries import ExpectedAttention, SnapKV

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16 if GPU else torch.float16]
LAYERS, SIZE = 2, 16
BOUND = 2e-4 if GPU else 2e-5


@dataclass
class Case:
    """One request among the blocks of others, which hold NaN."""

    spec: AttentionSpec
    caches: list[KVCache]
    blocks: torch.Tensor
    num_tokens: int
    queries: torch.Tensor

    @classmethod
    def make(
        cls, heads: int, kv_heads: int, dim: int, num_tokens: int, num_queries: int,
        dtype: torch.dtype, soft_cap: float | None = None,
    ) -> Case:  # fmt: skip
        draw = torch.Generator().manual_seed(num_tokens)
        columns = -(-num_tokens // SIZE)
        order = torch.randperm(2 * columns, generator=draw)[:columns].int() + 1
        caches: list[KVCache] = []
        for _ in range(LAYERS):
            cache = torch.full((2, 2 * columns + 1, SIZE, kv_heads, dim), torch.nan)
            content = torch.randn(2, columns * SIZE, kv_heads, dim, generator=draw)
            content[:, num_tokens:] = torch.nan
            cache[:, order.long()] = content.view(2, columns, SIZE, kv_heads, dim)
            caches.append(cache.to(DEVICE, dtype))
        queries = torch.randn(LAYERS, num_queries, heads, dim, generator=draw).to(DEVICE, dtype)
        spec = AttentionSpec(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=0.4, soft_cap=soft_cap
        )
        return cls(spec, caches, order.to(DEVICE), num_tokens, queries)

    def check(
        self, policy: Window | KeyNorm | KeyDiff | SnapKV | ExpectedAttention, bound: float = BOUND
    ) -> None:
        """Check that the scores are those of copies in float32."""
        more = {"queries": self.queries} if policy.num_queries else {}
        scores = policy.cached_scores(self.spec, self.caches, self.blocks, self.num_tokens, **more)
        assert scores is not None and scores.dtype == torch.float32
        for layer, cache in enumerate(self.caches):
            parts = ((read_keys, self.spec.key_scale), (read_values, self.spec.value_scale))
            keys, values = (
                read(cache, self.blocks.long(), torch.float32, scale).float().flatten(0, 1)
                for read, scale in parts
            )
            keys, values = keys[: self.num_tokens], values[: self.num_tokens]
            own = {"queries": self.queries[layer].float()} if more else {}
            expected = policy.scores(self.spec, keys, values, **own).T
            torch.testing.assert_close(scores[layer], expected, atol=bound * 0.1, rtol=bound)


POLICIES = [Window, KeyNorm, KeyDiff, SnapKV, ExpectedAttention]
SHAPES = [(4, 2, 16, 40, 16), (6, 2, 24, 150, 5), (2, 2, 16, 33, 1), (8, 1, 64, 1100, 16)]
"""Heads, KV heads, channels, tokens (in a block; in several tiles; in several parts), queries."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_scores_are_those_of_copies(
    policy: type[Window], shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    if GPU and dtype == torch.float32 and policy.num_queries:
        pytest.skip("on a GPU, products of float32 are left to copies")
    Case.make(*shape, dtype).check(policy())


@pytest.mark.parametrize("policy", [SnapKV, ExpectedAttention])
def test_logits_are_capped(policy: type[SnapKV]) -> None:
    Case.make(4, 2, 16, 70, 16, DTYPES[1], soft_cap=2.0).check(policy())


@pytest.mark.parametrize("policy", POLICIES)
def test_numbers_of_fp8_have_scales(policy: type[Window]) -> None:
    case = Case.make(4, 2, 16, 70, 16, DTYPES[1])
    case.spec = msgspec.structs.replace(case.spec, key_scale=0.5, value_scale=0.25)
    case.caches = [torch.as_tensor(c).to(torch.float8_e4m3fn) for c in case.caches]
    case.check(policy())


@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
@pytest.mark.parametrize("policy", POLICIES)
def test_codes_have_scales_and_zeros(policy: type[Window], name: str) -> None:
    case = Case.make(4, 2, 32, 70, 16, DTYPES[1])
    form, order = QUANTIZED_FORMATS[name], torch.arange(70, device=DEVICE)
    places = case.blocks[order // SIZE].long() * SIZE + order % SIZE
    caches: list[KVCache] = []
    for cache in case.caches:
        assert isinstance(cache, torch.Tensor)
        shape = cache.shape[1:3]
        parts = {
            # Words of others are NaN.
            part.name: torch.full(
                (part.count, *shape, *part.shape),
                0x7FC07FC0 if part.name == "scales" else 3,
                dtype=getattr(torch, part.dtype),
                device=DEVICE,
            )
            for part in form.parts(2, 32)
        }
        keys, values = cache.flatten(1, 2)[:, places]
        quantized = QuantizedCache.of(parts)
        write_blocks(keys, values, quantized, places)
        caches.append(quantized)
    case.caches = caches
    # Numbers are rounded to the type of the queries for their product.
    case.check(policy(), 2e-2 if GPU else 2e-3)


def test_heads_of_halves_that_fill_no_tile_are_left_to_copies() -> None:
    codes = torch.zeros(3, SIZE, 2, 12, dtype=torch.uint8, device=DEVICE)
    words = torch.zeros(2, 3, 2, SIZE, dtype=torch.int32, device=DEVICE)
    case = Case.make(4, 2, 24, 20, 1, DTYPES[1])
    quantized = [QuantizedCache(codes, codes, words)] * LAYERS
    assert KeyNorm().cached_scores(case.spec, quantized, case.blocks, 20) is None


def test_keys_of_no_length_have_no_direction() -> None:
    case = Case.make(2, 2, 16, 40, 1, DTYPES[1])
    for cache in case.caches:
        assert isinstance(cache, torch.Tensor)
        cache[:, case.blocks[:1].long(), 5:8] = 0.0
    case.check(KeyDiff())


@pytest.mark.parametrize("policy", [SnapKV, ExpectedAttention])
def test_fewer_queries_need_no_other_kernel(
    policy: type[SnapKV], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm-up has few, and a prefix hit may leave few; nothing is compiled while serving."""
    constants: dict[int, list[Any]] = {}
    for count in (2, policy.num_queries):
        launches = constants[count] = []

        def launch(kernel: Any, grid: Any, launches: list[Any] = launches) -> Any:
            return lambda *args, **keywords: launches.append((kernel, keywords))

        monkeypatch.setattr(query_scores, "launch", launch)
        case = Case.make(4, 2, 16, 70, count, DTYPES[1])
        policy().cached_scores(case.spec, case.caches, case.blocks, 70, queries=case.queries)
    assert constants[2] == constants[policy.num_queries] and len(constants[2]) == 2


@pytest.mark.parametrize(
    ("group", "dim", "served"), [(8, 256, True), (16, 128, True), (16, 256, False), (32, 64, False)]
)
def test_more_queries_than_fit_are_left_to_copies(group: int, dim: int, served: bool) -> None:
    case = Case.make(group, 1, dim, 20, 1, DTYPES[1])
    scores = ExpectedAttention().cached_scores(
        case.spec, case.caches, case.blocks, 20, queries=case.queries
    )
    assert (scores is not None) == served
