"""Decode rows with a common prefix, which is read once, against the twin that reads it per row."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.kernels.attention import reference
from jackfield.kernels.attention.paged_attention_decode import paged_attention_decode
from jackfield.kernels.attention.shared_prefix import (
    attend_prefix,
    prefix_elements,
    prefix_splits,
)

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
DTYPES = [torch.float32, torch.bfloat16 if CUDA else torch.float16]


def make_rows(prefix, lengths, heads, kv_heads, dim, block_size, dtype):
    """query, kv_cache, block_table and seq_lens of rows that share the blocks of `prefix` tokens;
    all that no row holds is NaN."""
    random = torch.Generator().manual_seed(prefix)
    common = prefix // block_size
    own = [-(-(length - prefix) // block_size) for length in lengths]
    order = (torch.randperm(common + sum(own), generator=random) + 1).int()
    table = torch.zeros(len(lengths), common + max(own) + 1, dtype=torch.int32)
    table[:, :common] = order[:common]
    shape = (2, common + sum(own) + 1, block_size, kv_heads, dim)
    cache = torch.full(shape, float("nan"), dtype=dtype)
    first = common
    for row, (length, count) in enumerate(zip(lengths, own, strict=True)):
        table[row, common : common + count] = order[first : first + count]
        first += count
        places = torch.arange(length)
        blocks = table[row, places // block_size].long()
        values = torch.randn(2, length, kv_heads, dim, generator=random).to(dtype)
        cache[:, blocks, places % block_size] = values
    query = torch.randn(len(lengths), heads, dim, generator=random).to(dtype)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return tuple(part.to(DEVICE) for part in (query, cache, table, seq_lens))


def length_of(prefix):
    return torch.tensor([prefix], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("prefix", "heads", "kv_heads", "dim", "block", "splits", "own_splits", "more"),
    [
        (128, 4, 4, 64, 16, 1, 1, {}),
        # Two splits, of which the last is shorter, and one without work.
        (320, 8, 2, 64, 16, 3, 1, {}),
        (320, 8, 1, 80, 4, 8, 3, {"soft_cap": 5.0}),
        (272, 6, 2, 32, 16, 2, 2, {"sinks": True}),
        (64, 2, 1, 128, 32, 4, 5, {}),
        (192, 4, 2, 256, 16, 2, 1, {}),
    ],
)
def test_rows_with_a_common_prefix_equal_the_twin(
    dtype, prefix, heads, kv_heads, dim, block, splits, own_splits, more
):
    # Rows that have one token more, end a tile, and have splits of their own.
    lengths = [prefix + own for own in (1, 64, 17, 200, 65)]
    query, cache, table, seq_lens = make_rows(prefix, lengths, heads, kv_heads, dim, block, dtype)
    options = {"scale": dim**-0.5, "soft_cap": more.get("soft_cap")}
    shared = attend_prefix(query, cache, table, length_of(prefix), num_splits=splits, **options)
    if "sinks" in more:
        options["sinks"] = torch.randn(heads, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    actual = paged_attention_decode(
        query, cache, table, seq_lens, num_splits=own_splits, prefix=shared, **options
    )
    expected = reference.paged_attention_decode(query, cache, table, seq_lens, **options)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("splits", [1, 3])
def test_without_a_prefix_rows_have_nothing_in_common(splits):
    query, cache, table, seq_lens = make_rows(0, [1, 70, 200], 4, 2, 64, 16, torch.float32)
    # Less than a unit counts as nothing, too.
    for prefix in (0, 63):
        shared = attend_prefix(
            query, cache, table, length_of(prefix), scale=0.125, num_splits=2,
            workspace=torch.full((prefix_elements(3, 4, 64, 2),), float("nan"), device=DEVICE),
        )  # fmt: skip
        actual = paged_attention_decode(
            query, cache, table, seq_lens, scale=0.125, num_splits=splits, prefix=shared
        )
        expected = reference.paged_attention_decode(query, cache, table, seq_lens, scale=0.125)
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def test_a_padding_row_beside_a_prefix_stays_finite():
    query, cache, table, seq_lens = make_rows(128, [130, 200], 2, 1, 16, 16, torch.float32)
    seq_lens[1], table[1], cache[:, 0] = 1, 0, 0.0
    for splits in (1, 3):
        shared = attend_prefix(query, cache, table, length_of(128), scale=0.25, num_splits=2)
        actual = paged_attention_decode(
            query, cache, table, seq_lens, scale=0.25, num_splits=splits, prefix=shared
        )
        expected = reference.paged_attention_decode(
            query[:1], cache, table[:1], seq_lens[:1], scale=0.25
        )
        torch.testing.assert_close(actual[:1], expected, atol=2e-5, rtol=2e-5)
        assert torch.isfinite(actual).all()


def test_decode_rows_that_the_device_alone_knows():
    """The rows after the decode rows are left alone, in the sums as well."""
    query, cache, table, seq_lens = make_rows(128, [130, 200, 150], 4, 2, 16, 16, torch.float32)
    query[2] = float("nan")
    sums = torch.full((prefix_elements(3, 4, 16, 2),), float("nan"), device=DEVICE)
    bounds = torch.tensor([2, 1], dtype=torch.int32, device=DEVICE)
    start = torch.tensor([0, 1, 2, 7], dtype=torch.int32, device=DEVICE)
    options = {"scale": 0.25}
    shared = attend_prefix(
        query, cache, table, length_of(128), num_splits=2, bounds=bounds, workspace=sums, **options
    )
    out = torch.zeros_like(query)
    paged_attention_decode(
        query, cache, table, seq_lens, num_splits=2, prefix=shared, query_start=start, out=out,
        **options,
    )  # fmt: skip
    expected = reference.paged_attention_decode(
        query[:2], cache, table[:2], seq_lens[:2], **options
    )
    torch.testing.assert_close(out[:2], expected, atol=2e-5, rtol=2e-5)
    assert not out[2].any()
    assert sums.view(-1)[: 3 * 4 * 2 * 16].view(3, -1)[2].isnan().all()


def test_attention_to_a_prefix_refuses_a_small_workspace():
    query, cache, table, _ = make_rows(64, [65], 2, 1, 16, 16, torch.float32)
    small = torch.empty(prefix_elements(1, 2, 16, 2) - 1, device=DEVICE)
    with pytest.raises(ValueError, match="workspace"):
        attend_prefix(query, cache, table, length_of(64), scale=1.0, num_splits=2, workspace=small)


def test_splits_of_a_prefix_give_each_multiprocessor_three_programs():
    shape = (32, 8, 128, torch.bfloat16, 132)
    assert [prefix_splits(rows, *shape) for rows in (1, 16, 64, 256)] == [16, 16, 12, 3]
