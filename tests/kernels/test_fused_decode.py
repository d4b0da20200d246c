"""Decode attention from the projection, against its parts one after another."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from helpers import few_interpreted

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.kernels.attention import fused_decode_config, reference
from jackfield.kernels.attention.decode_splits import workspace_elements
from jackfield.kernels.attention.fused_decode_attention import fused_decode_attention
from jackfield.kernels.attention.fused_decode_config import fits_registers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
# Triton's interpreter multiplies the raw bits of bfloat16 in tl.dot.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
LENGTHS = [1, 2, 64, 65, 130, 33, 200, 129] if DEVICE.type == "cuda" else [1, 64, 65, 130]


class Case:
    """A random layer in the middle of a decode step."""

    def __init__(self, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(heads + dim)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

        rows, block_size, per_row = len(LENGTHS), 16, 13
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.qkv = draw(rows, (heads + 2 * kv_heads) * dim)
        self.cache = draw(2, rows * per_row + 1, block_size, kv_heads, dim)
        order = torch.randperm(rows * per_row, generator=generator) + 1
        self.table = order.view(rows, per_row).int().to(DEVICE)
        self.seq_lens = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
        newest = self.seq_lens.long() - 1
        blocks = self.table.gather(1, (newest // block_size)[:, None])[:, 0].long()
        self.slots = blocks * block_size + newest % block_size
        turns = torch.rand(256, dim // 2, generator=generator) * 6
        self.cos_sin = torch.cat((turns.cos(), turns.sin()), dim=1).to(DEVICE)
        turns = turns[:, : dim // 4]
        self.partial_cos_sin = torch.cat((turns.cos(), turns.sin()), dim=1).to(DEVICE)
        self.slopes = torch.linspace(0.01, 0.2, heads, device=DEVICE)
        self.norms = [(draw(dim) * 0.1 + 1, 1e-6), (draw(dim).float() * 0.1 + 1, 1e-5)]
        # What lies beyond a sequence is never read.
        for row, length in enumerate(LENGTHS):
            for position in range(length - 1, per_row * block_size):
                block = int(self.table[row, position // block_size])
                self.cache[:, block, position % block_size] = float("nan")

    def expected(
        self,
        cos_sin: torch.Tensor | None,
        norms: bool,
        norm_last: bool = False,
        **options: float,
    ) -> tuple[torch.Tensor, ...]:
        qkv, cache = self.qkv.clone(), self.cache.clone()
        query_norm, key_norm = self.norms if norms else (None, None)
        if norm_last:
            reference.qk_norm_rope_cache(
                qkv, self.heads, self.kv_heads, self.seq_lens.long() - 1, cos_sin
            )
            cos_sin = None
        reference.qk_norm_rope_cache(
            qkv, self.heads, self.kv_heads, self.seq_lens.long() - 1,
            cos_sin, query_norm, key_norm, cache, self.slots,
        )  # fmt: skip
        query = qkv[:, : self.heads * self.dim].view(-1, self.heads, self.dim)
        out = reference.paged_attention_decode(
            query, cache, self.table, self.seq_lens, scale=self.dim**-0.5, **options
        )
        return out, cache


HEADS = [(4, 2, 64), (3, 1, 80), (8, 8, 32), (32, 2, 16), (8, 1, 512)]
FEW = [
    (torch.float32, 1, (8, 8, 32)), (torch.float32, 3, (4, 2, 64)),
    (torch.float16, 3, (32, 2, 16)), (torch.float16, 20, (3, 1, 80)),
    (torch.float16, 3, (8, 1, 512)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "splits", "sizes"),
    few_interpreted(
        (
            (dtype, splits, (heads, kv_heads, dim))
            for dtype, splits, (heads, kv_heads, dim) in itertools.product(
                DTYPES, [1, 3, 20], HEADS
            )
            if fits_registers(heads // kv_heads, dim, dtype)
        ),
        FEW,
    ),
    ids=str,
)
def test_it_equals_its_parts(dtype, splits, sizes, monkeypatch):
    """Whether keys of short splits, or the next ones of any, are loaded ahead or none are, and
    whether a row's new token has a program of its own or not."""
    heads, kv_heads, dim = sizes
    case = Case(heads, kv_heads, dim, dtype)
    rows = len(LENGTHS)
    counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device=DEVICE)
    workspace = torch.full(
        (workspace_elements(rows, heads, dim, splits),), float("nan"), device=DEVICE
    )
    variants = [
        (case.cos_sin, True, {}),
        (None, False, {"alibi_slopes": case.slopes}),
        (case.partial_cos_sin, True, {"sliding_window": 70, "norm_last": True}),
        (None, True, {"soft_cap": 5.0}),
        (case.cos_sin, True, {"attention_chunk_size": 43}),
        (None, False, {"attention_chunk_size": 24, "chunk_lookback": 1}),
    ]
    monkeypatch.setattr(fused_decode_config, "PRELOAD_BEHIND", 0)
    for (most, ahead), (number, (cos_sin, norms, options)) in itertools.product(
        ((fused_decode_config.PRELOAD_BYTES, 0), (0, 0), (0, rows)), enumerate(variants)
    ):
        monkeypatch.setattr(fused_decode_config, "PRELOAD_BYTES", most)
        monkeypatch.setattr(fused_decode_config, "AHEAD_ROWS", ahead)
        monkeypatch.setattr(
            fused_decode_config,
            "NEW_TOKEN_PROGRAM_ROWS",
            0 if (number % 2 == 0) == (most > 0) else rows,
        )
        expected, want_cache = case.expected(cos_sin, norms, **options)
        cache = case.cache.clone()
        query_norm, key_norm = case.norms if norms else (None, None)
        actual = fused_decode_attention(
            case.qkv, heads, kv_heads, cache, case.table, case.seq_lens, case.slots,
            scale=dim**-0.5, counters=counters, workspace=workspace, num_splits=splits,
            cos_sin=cos_sin, query_norm=query_norm, key_norm=key_norm, **options,
        )  # fmt: skip
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(
            cache, want_cache, atol=tolerance, rtol=tolerance, equal_nan=True
        )
        assert not counters.any()


def test_positions_may_be_ahead_of_the_cache():
    """Rows whose caches have lost tokens: the angles are those of the positions, all else follows
    from the lengths."""
    heads, kv_heads, dim = 4, 2, 32
    case = Case(heads, kv_heads, dim, torch.float32)
    positions = torch.tensor(
        [length - 1 + 7 * row for row, length in enumerate(LENGTHS)], device=DEVICE
    )
    qkv, want_cache, cache = case.qkv.clone(), case.cache.clone(), case.cache.clone()
    reference.qk_norm_rope_cache(
        qkv, heads, kv_heads, positions, case.cos_sin, *case.norms, want_cache, case.slots
    )
    query = qkv[:, : heads * dim].view(-1, heads, dim)
    expected = reference.paged_attention_decode(
        query, want_cache, case.table, case.seq_lens, scale=dim**-0.5
    )
    rows = len(LENGTHS)
    actual = fused_decode_attention(
        case.qkv, heads, kv_heads, cache, case.table, case.seq_lens, case.slots,
        scale=dim**-0.5, num_splits=3, cos_sin=case.cos_sin, positions=positions,
        counters=torch.zeros(rows * kv_heads, dtype=torch.int32, device=DEVICE),
        workspace=torch.empty(workspace_elements(rows, heads, dim, 3), device=DEVICE),
        query_norm=case.norms[0], key_norm=case.norms[1],
    )  # fmt: skip
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(cache, want_cache, atol=2e-5, rtol=2e-5, equal_nan=True)


def test_queries_are_kept_at_their_places():
    """Normed and rotated, as attention uses them; nothing else of the ring is written."""
    heads, kv_heads, dim = 3, 1, 80
    case = Case(heads, kv_heads, dim, torch.float32)
    rows = len(LENGTHS)
    qkv = case.qkv.clone()
    reference.qk_norm_rope_cache(
        qkv, heads, kv_heads, case.seq_lens.long() - 1, case.cos_sin, *case.norms,
        case.cache.clone(), case.slots,
    )  # fmt: skip
    expected = torch.full((40, heads, dim), -7.0, device=DEVICE)
    places = torch.arange(rows, device=DEVICE) * 3 + 2
    expected[places] = qkv[:, : heads * dim].view(rows, heads, dim)
    ring = torch.full_like(expected, -7.0)
    fused_decode_attention(
        case.qkv, heads, kv_heads, case.cache.clone(), case.table, case.seq_lens, case.slots,
        scale=dim**-0.5, num_splits=3, cos_sin=case.cos_sin, query_ring=(ring, places),
        counters=torch.zeros(rows * kv_heads, dtype=torch.int32, device=DEVICE),
        workspace=torch.empty(workspace_elements(rows, heads, dim, 3), device=DEVICE),
        query_norm=case.norms[0], key_norm=case.norms[1],
    )  # fmt: skip
    torch.testing.assert_close(ring, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("length", [50, 190])
@pytest.mark.parametrize("numbers", [[], [100], [70_000], [3_000, 5_000_000], [5_000_000] * 3])
def test_weights_that_are_asked_for_change_nothing(numbers, length):
    """On a card, one row's programs ask the L2 cache for them; short and long splits, weights of
    any size and number."""
    heads, kv_heads, dim = 4, 2, 64
    case = Case(heads, kv_heads, dim, torch.float16)
    weights = [torch.zeros(number, dtype=torch.float16, device=DEVICE) for number in numbers]
    results = []
    for next_weights in ([], weights):
        for splits in (1, 3):
            cache = case.cache.clone()
            cache.nan_to_num_()
            out = fused_decode_attention(
                case.qkv[:1], heads, kv_heads, cache, case.table[:1],
                torch.tensor([length], dtype=torch.int32, device=DEVICE), case.slots[:1],
                scale=dim**-0.5, num_splits=splits, next_weights=next_weights,
                counters=torch.zeros(kv_heads, dtype=torch.int32, device=DEVICE),
                workspace=torch.empty(workspace_elements(1, heads, dim, splits), device=DEVICE),
            )  # fmt: skip
            results.append(torch.cat([out.flatten(), cache.flatten()]))
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


def test_it_refuses_what_does_not_fit():
    case = Case(4, 2, 64, torch.float32)
    arguments = (case.qkv, 4, 2, case.cache, case.table, case.seq_lens, case.slots)
    counters = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="rotates 128 channels"):
        fused_decode_attention(
            *arguments, scale=1.0, counters=counters, workspace=case.qkv.view(-1),
            cos_sin=torch.cat((case.cos_sin, case.cos_sin), dim=1),
        )  # fmt: skip
    with pytest.raises(ValueError, match="workspace has 1 elements"):
        fused_decode_attention(
            *arguments, scale=1.0, counters=counters, workspace=torch.zeros(1), num_splits=4
        )
    wide = Case(1, 1, 512, torch.float32)
    with pytest.raises(ValueError, match=r"1 heads of 512 channels of torch\.float32"):
        fused_decode_attention(
            wide.qkv, 1, 1, wide.cache, wide.table, wide.seq_lens, wide.slots, scale=1.0,
            counters=counters, workspace=counters,
        )  # fmt: skip
