"""Attention over caches of small integers, and what writes them, against their twins in torch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.core.cache.formats import QUANTIZED_FORMATS
from jackfield.core.nn.kv_cache.quantized_cache import QuantizedCache, dequantize, quantize
from jackfield.kernels.attention import fused_decode_config, reference
from jackfield.kernels.attention.decode_splits import workspace_elements
from jackfield.kernels.attention.fused_decode_attention import fused_decode_attention
from jackfield.kernels.attention.fused_decode_config import fits_registers
from jackfield.kernels.attention.paged_attention_decode import paged_attention_decode
from jackfield.kernels.attention.paged_attention_prefill import paged_attention_prefill
from jackfield.kernels.attention.qk_norm_rope_cache import qk_norm_rope_cache

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16 if GPU else torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
HEADS, KV_HEADS, BLOCK = 4, 2, 4
NAN = 0x7FC07FC0
"""A word whose scale and zero are NaN."""
DIMS = [16, 40, *([128, 512] if GPU else [])]
WIDE = 320
"""A head whose values' channels two programs of a prompt share."""
FEATURES: list[dict[str, Any]] = [
    {},
    {"sliding_window": 9, "soft_cap": 3.0},
    {"attention_chunk_size": 5, "chunk_lookback": 1},
    {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625], "sinks": [-1.0, 2.0, 0.5, 4.0]},
]


def options(features: dict[str, Any]) -> dict[str, Any]:
    return {
        "scale": 0.3,
        **{
            name: torch.tensor(value, device=DEVICE) if isinstance(value, list) else value
            for name, value in features.items()
        },
    }


class Case:
    """Rows whose earlier tokens are cached; everything else has words of NaN."""

    def __init__(
        self, name: str, dim: int, dtype: torch.dtype, rows: dict[int, int], block: int = BLOCK
    ) -> None:
        """rows: length → queries"""
        draw = torch.Generator().manual_seed(dim)
        self.lengths, self.counts = list(rows), list(rows.values())
        columns = -(-max(rows) // block)
        order = torch.randperm(len(rows) * columns, generator=draw).int() + 1
        table = order.view(len(rows), -1)
        blocks = 1 + order.numel()
        form = QUANTIZED_FORMATS[name]
        parts = {
            part.name: torch.full(
                (part.count, blocks, block, *part.shape),
                NAN if part.name == "scales" else 3,
                dtype=getattr(torch, part.dtype),
                device=DEVICE,
            )
            for part in form.parts(KV_HEADS, dim)
        }
        self.cache = QuantizedCache.of(parts)
        places = [
            [int(table[row, n // block]) * block + n % block for n in range(length)]
            for row, length in enumerate(rows)
        ]
        pairs = list(zip(places, self.counts, strict=True))
        old = torch.tensor([place for own, count in pairs for place in own[:-count]], device=DEVICE)
        new = [place for own, count in pairs for place in own[-count:]]
        key, value = torch.randn(2, len(old), KV_HEADS, dim, generator=draw)
        reference.kv_cache_write(2 * key.to(DEVICE) + 1, value.to(DEVICE), self.cache, old)
        self.slots = torch.tensor(new, device=DEVICE)
        self.table = table.to(DEVICE)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        self.positions = torch.cat([torch.arange(n - count, n) for n, count in rows.items()]).to(
            DEVICE
        )
        starts = torch.tensor([0, *self.counts]).cumsum(0)
        self.starts = starts.int().to(DEVICE)
        width = (HEADS + 2 * KV_HEADS) * dim
        qkv = torch.randn(int(starts[-1]), width, generator=draw)
        self.qkv = qkv.to(DEVICE, dtype)
        turns = torch.rand(100, dim // 2, generator=draw) * 6
        self.cos_sin = torch.cat((turns.cos(), turns.sin()), dim=1).to(DEVICE)
        norm = torch.rand(dim, generator=draw) + 0.5
        self.norms = [(norm.to(DEVICE, dtype), 1e-6), (norm.flip(0).to(DEVICE, dtype), 1e-6)]

    def written(
        self, function: Any = reference.qk_norm_rope_cache, rotary: int | None = None
    ) -> Any:
        """→ queries, and the cache with the new tokens"""
        qkv, cache = self.qkv.clone(), QuantizedCache(*(part.clone() for part in self.cache))
        cos_sin = self.cos_sin
        if rotary is not None:
            cos_sin = torch.cat([half[:, : rotary // 2] for half in cos_sin.chunk(2, 1)], dim=1)
        function(
            qkv, HEADS, KV_HEADS, self.positions, cos_sin, *self.norms,
            kv_cache=cache, slot_mapping=self.slots,
        )  # fmt: skip
        return qkv.view(len(qkv), HEADS + 2 * KV_HEADS, -1)[:, :HEADS], cache


def assert_same(cache: QuantizedCache, expected: QuantizedCache, dtype: torch.dtype) -> None:
    """Bit by bit in the interpreter; a GPU divides, and so rounds, in another way now and then."""
    if not GPU:
        assert all(torch.equal(*parts) for parts in zip(cache, expected, strict=True))
        return
    got, want = (reference.dequantize_cache(each) for each in (cache, expected))
    assert torch.equal(got.isnan(), want.isnan())
    apart = (got - want).nan_to_num().abs() > 1e-3
    assert apart.float().mean() < 0.02 and (got - want).nan_to_num().abs().max() < 1.0


@pytest.mark.parametrize("bits", [8, 4])
def test_the_twin_agrees_with_the_operations_of_the_core(bits: int) -> None:
    x = torch.randn(50, 3, 24, generator=torch.Generator().manual_seed(0)) * 3 + 1
    x[0], x[1] = 0.0, -3.0
    codes, words = quantize(x, bits)
    twin = reference.quantize_heads(x, bits)
    assert torch.equal(twin[0], codes) and torch.equal(twin[1], words)
    cache = (codes[:, None], codes[:, None], torch.stack([words[:, :, None]] * 2))
    assert torch.equal(reference.dequantize_cache(cache)[1, :, 0], dequantize(codes, words))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
def test_decode(name: str, dim: int, dtype: torch.dtype) -> None:
    case = Case(name, dim, dtype, {1: 1, 9: 1, 70: 1, 64: 1})
    query, cache = case.written()
    if dim > 256 and dtype == torch.float32 and name != "int4":
        with pytest.raises(ValueError, match="float32 heads of 512 channels"):
            paged_attention_decode(query, cache, case.table, case.seq_lens, **options({}))
        return
    for features in FEATURES if dim == 16 else FEATURES[:1]:
        more = options(features)
        expected = reference.paged_attention_decode(
            query.float(), cache, case.table, case.seq_lens, **more
        )
        for splits in (1, 2):
            out = paged_attention_decode(
                query, cache, case.table, case.seq_lens, num_splits=splits, **more
            )
            bound = TOLERANCE[dtype]
            torch.testing.assert_close(out.float(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
def test_decode_of_several_tokens_per_row(name: str) -> None:
    case = Case(name, 16, DTYPES[-1], {3: 3, 19: 3, 70: 3, 64: 3})
    query, cache = case.written()
    for features in FEATURES:
        more = options(features)
        expected = reference.paged_attention(
            query.float(), cache, case.table, case.starts, case.seq_lens, **more
        )
        out = paged_attention_decode(
            query, cache, case.table, case.seq_lens, num_splits=3, width=3, **more
        )
        bound = TOLERANCE[DTYPES[-1]]
        torch.testing.assert_close(out.float(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize(
    ("name", "dim", "block"),
    [("int8", 16, 12), ("int8", 9, 4), ("int8_int4", 18, 4), ("int4", 18, 12)],
)
def test_blocks_and_heads_of_any_size(name: str, dim: int, block: int) -> None:
    """Blocks that no tile is a multiple of; heads with an odd number of bytes, which the decode
    kernels cannot read two at a time."""
    case = Case(name, dim, torch.float32, {1: 1, 9: 1, 70: 1, 64: 1}, block)
    query, cache = case.written(rotary=None if dim % 2 == 0 else dim - 1)
    for features in FEATURES[:2]:
        more = options(features)
        expected = reference.paged_attention_decode(query, cache, case.table, case.seq_lens, **more)
        out = paged_attention_decode(query, cache, case.table, case.seq_lens, **more)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
        if dim % 2:
            continue
        out = fused_decode_attention(
            case.qkv, HEADS, KV_HEADS, case.cache, case.table, case.seq_lens, case.slots,
            counters=torch.zeros(64, dtype=torch.int32, device=DEVICE),
            workspace=torch.empty(workspace_elements(4, HEADS, dim, 2), device=DEVICE),
            num_splits=2, cos_sin=case.cos_sin, query_norm=case.norms[0], key_norm=case.norms[1],
            **more,
        )  # fmt: skip
        torch.testing.assert_close(out, expected, atol=4e-5, rtol=4e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [*DIMS, WIDE])
@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
def test_prefill(name: str, dim: int, dtype: torch.dtype) -> None:
    case = Case(name, dim, dtype, {7: 7, 19: 3, 70: 40})
    query, cache = case.written()
    for features in FEATURES if dim == 16 else FEATURES[:1]:
        more = options(features)
        expected = reference.paged_attention(
            query.float(), cache, case.table, case.starts, case.seq_lens, **more
        )
        out = paged_attention_prefill(
            query, cache, case.table, case.starts, case.seq_lens, max_query_len=40, **more
        )
        bound = TOLERANCE[dtype] * max(1, dim / 64)
        torch.testing.assert_close(out.float(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
def test_heads_are_written(name: str, dtype: torch.dtype) -> None:
    for dim in DIMS:
        case = Case(name, dim, dtype, {7: 7, 19: 3, 30: 4})
        query, cache = case.written(qk_norm_rope_cache)
        expected_query, expected = case.written()
        bound = 2 * TOLERANCE[dtype]
        torch.testing.assert_close(query, expected_query, atol=bound, rtol=bound)
        if dtype == torch.float32:
            assert_same(cache, expected, dtype)


def test_partly_rotated_heads_are_written() -> None:
    """With 8 bits; with 4, the kernel would have other channels together than share a byte."""
    case = Case("int8", 40, torch.float32, {7: 7, 19: 3})
    assert_same(case.written(qk_norm_rope_cache, 16)[1], case.written(rotary=16)[1], torch.float32)
    with pytest.raises(ValueError, match="16 channels of 40"):
        Case("int8_int4", 40, torch.float32, {7: 7}).written(qk_norm_rope_cache, 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", QUANTIZED_FORMATS)
def test_fused_decode(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes what the separate kernels write, and attends to that."""
    for dim in DIMS:
        if not fits_registers(HEADS // KV_HEADS, dim, dtype):
            continue
        case = Case(name, dim, dtype, {1: 1, 9: 1, 70: 1, 65: 1})
        query, expected_cache = case.written()
        more = options(FEATURES[1])
        expected = reference.paged_attention_decode(
            query.float(), expected_cache, case.table, case.seq_lens, **more
        )
        for splits, own_rows in ((1, 0), (3, 0), (3, 4)):
            monkeypatch.setattr(fused_decode_config, "NEW_TOKEN_PROGRAM_ROWS", own_rows)
            cache = QuantizedCache(*(part.clone() for part in case.cache))
            ring = torch.zeros(4, HEADS, dim, dtype=dtype, device=DEVICE)
            out = fused_decode_attention(
                case.qkv, HEADS, KV_HEADS, cache, case.table, case.seq_lens, case.slots,
                counters=torch.zeros(64, dtype=torch.int32, device=DEVICE),
                workspace=torch.empty(workspace_elements(4, HEADS, dim, splits), device=DEVICE),
                num_splits=splits,
                cos_sin=case.cos_sin, query_norm=case.norms[0], key_norm=case.norms[1],
                positions=case.positions, query_ring=(ring, torch.arange(4, device=DEVICE)), **more,
            )  # fmt: skip
            bound = 2 * TOLERANCE[dtype]
            torch.testing.assert_close(out.float(), expected, atol=bound, rtol=bound)
            torch.testing.assert_close(ring, query, atol=bound, rtol=bound)
            if dtype == torch.float32:
                assert_same(cache, expected_cache, dtype)
