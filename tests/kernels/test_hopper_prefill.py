"""The prompt kernel for Hopper GPUs against its torch twin, and the caches that it takes."""

from __future__ import annotations

import pytest
import torch
import triton
from test_attention_kernels import make_rows, reach

from jackfield.core.worker.start.warmup import LATER_PARTS
from jackfield.kernels.attention import reference
from jackfield.kernels.attention.paged_attention_prefill import (
    HOPPER_SMALL_ROWS,
    paged_attention_prefill,
)

hopper = pytest.importorskip("jackfield.kernels.attention.hopper_prefill")
CUDA = torch.device("cuda")
LENGTHS = [(128, 0), (1, 40), (0, 0), (300, 133), (17, 500), (5, 0), (64, 1000)]
"""Tokens of each row, and cached ones before them"""
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or hopper.num_programs(CUDA) == 0, reason="needs a Hopper GPU"
)


def run(query, cache, table, start, seq_lens, **more):
    options = {
        "attention_chunk_size": None, "sliding_window": None, "chunk_lookback": 0,
        "soft_cap": None, "sinks": None, "bounds": None, **more,
    }  # fmt: skip
    return hopper.hopper_prefill(
        query, cache, table, start, seq_lens, torch.full_like(query, 7.0),
        first_row=0, num_rows=len(seq_lens), num_tokens=len(query),
        **{"value_scale": 1.0, **options},
    )  # fmt: skip


def rows(heads: int, kv_heads: int, dim: int, block: int, dtype: torch.dtype = torch.bfloat16):
    """All that no row holds is NaN."""
    return make_rows(
        [fresh + cached for fresh, cached in LENGTHS], [fresh for fresh, _ in LENGTHS],
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, block_size=block, dtype=dtype,
    )  # fmt: skip


@needs_hopper
@pytest.mark.parametrize("most_programs", [None, 3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "within", "more"),
    [
        (8, 2, 128, 16, None, {}),
        (10, 2, 128, 64, 100, {}),
        (4, 4, 64, 16, None, {"soft_cap": 20.0}),
        (64, 1, 64, 8, 16, {"sinks": True}),
        (4, 2, 256, 16, (96, 1), {"soft_cap": 5.0, "sinks": True}),
        (4, 2, 256, 256, None, {}),
        (4, 4, 96, 16, None, {}),
        (6, 2, 80, 32, 50, {"sinks": True}),
        (4, 1, 192, 16, None, {}),
    ],
)
def test_it_equals_its_twin(heads, kv_heads, dim, block, within, more, most_programs) -> None:
    """Also with fewer programs than tiles."""
    parts = rows(heads, kv_heads, dim, block)
    if more.get("sinks"):
        more = {**more, "sinks": torch.linspace(-2.0, 5.0, heads).to(CUDA, torch.bfloat16)}
    options = {"scale": dim**-0.5, **reach(within), **more}
    actual = run(*parts, most_programs=most_programs, **options)
    expected = reference.paged_attention(*parts, **options)
    torch.testing.assert_close(actual, expected, atol=2.5e-2, rtol=2.5e-2)


@needs_hopper
def test_rows_that_the_device_alone_knows_equal_the_twin_and_others_are_left_alone() -> None:
    query, cache, table, start, seq_lens = rows(4, 2, 128, 16, torch.float16)
    bounds = torch.tensor([2, 4], dtype=torch.int32, device=CUDA)
    actual = run(query, cache, table, start, seq_lens, scale=0.1, bounds=bounds)
    expected = reference.paged_attention(query, cache, table, start, seq_lens, scale=0.1)
    first, end = int(start[2]), int(start[6])
    expected[:first] = expected[end:] = 7.0
    torch.testing.assert_close(actual, expected, atol=4e-3, rtol=4e-3)


def test_a_kernel_that_does_not_compile_is_left_out(monkeypatch, caplog) -> None:
    """The kernel for any GPU computes the same."""

    def fail(*arguments):
        raise triton.OutOfResources(300000, 232448, "shared memory")

    monkeypatch.setattr(hopper, "num_programs", lambda device: 528)
    monkeypatch.setattr(hopper, "INTERPRETED", False)
    monkeypatch.setattr(hopper, "_failures", [])
    monkeypatch.setattr(hopper, "launch", fail)
    parts = rows(4, 2, 64, 16, torch.float16)
    for _ in range(2):
        actual = paged_attention_prefill(*parts, scale=0.1, max_query_len=300)
        expected = reference.paged_attention(*parts, scale=0.1)
        torch.testing.assert_close(actual, expected, atol=4e-3, rtol=4e-3)
    assert caplog.text.count("does not compile") == 1


def test_it_is_compiled_at_the_start_for_heads_that_share_no_keys() -> None:
    assert max(LATER_PARTS) > HOPPER_SMALL_ROWS


def test_it_takes_caches_of_whole_pages_in_the_type_of_queries(monkeypatch) -> None:
    monkeypatch.setattr(hopper, "num_programs", lambda device: 528)
    monkeypatch.setattr(hopper, "INTERPRETED", False)
    query = torch.empty(5, 4, 128, dtype=torch.bfloat16)
    cache = torch.empty(2, 3, 16, 2, 128, dtype=torch.bfloat16)
    assert hopper.takes(query, cache)
    assert not hopper.takes(query[..., :96].clone(), cache[..., :96].clone()), "padded heads"
    apart = torch.empty(2, 3, 32, 2, 128, dtype=torch.bfloat16)[:, :, :16]
    assert not hopper.takes(query, apart), "pages apart"
    assert not hopper.takes(query, cache.to(torch.float8_e4m3fn))
    assert not hopper.takes(query.half(), cache)
    assert not hopper.takes(query.repeat(1, 65, 1), cache), "130 heads of a key head"
    assert not hopper.takes(query.float(), cache.float())
    assert not hopper.takes(query[..., :96], cache[..., :96]), "heads apart"
    for block_size in (4, 24):
        assert not hopper.takes(query, torch.empty(2, 3, block_size, 2, 128, dtype=torch.bfloat16))
