"""Each attention kernel against its torch twin, and what its launchers promise about splits."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.kernels.attention import reference
from jackfield.kernels.attention.decode_splits import choose_num_splits, workspace_elements
from jackfield.kernels.attention.paged_attention_decode import paged_attention_decode
from jackfield.kernels.attention.paged_attention_prefill import paged_attention_prefill

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# The interpreter cannot multiply bfloat16. Tolerances: float32 sums in another order; the weights
# of the softmax rounded to the storage type before they meet the values.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
DTYPES = [torch.float32, torch.bfloat16 if CUDA else torch.float16]


def make_rows(
    lengths: list[int],
    query_lens: list[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """query, kv_cache, block_table, query_start, seq_lens; all that no row holds is NaN."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lengths]
    order = (torch.randperm(sum(counts) + 3, generator=random) + 1).tolist()
    cache = torch.full(
        (2, sum(counts) + 4, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype
    )
    table = torch.zeros(len(lengths), max([*counts, 1]) + 1, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for index in range(count):
            block = order.pop()
            table[row, index] = block
            num_filled = min(block_size, length - index * block_size)
            shape = (2, num_filled, num_kv_heads, head_dim)
            cache[:, block, :num_filled] = torch.randn(shape, generator=random).to(dtype)
    query = torch.randn(sum(query_lens), num_heads, head_dim, generator=random).to(dtype)
    start = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return tuple(t.to(DEVICE) for t in (query, cache, table, start, seq_lens))


def reach(within):
    """A window, or chunks as (size, chunks before), as options of a kernel."""
    if isinstance(within, tuple):
        return {"attention_chunk_size": within[0], "chunk_lookback": within[1]}
    return {"sliding_window": within}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "window", "cap", "splits"),
    [
        (4, 4, 64, 16, None, None, 1),
        (4, 1, 64, 4, None, None, 3),
        (8, 1, 96, 16, 37, None, 4),
        (6, 2, 80, 16, None, 5.0, 2),
        (4, 2, 128, 32, 300, 30.0, 5),
        (2, 1, 16, 1, None, None, 2),
        (2, 2, 256, 4, 70, None, 1),
        (8, 2, 64, 16, (50, 0), None, 3),
        (4, 1, 64, 4, (33, 1), 5.0, 1),
        (2, 1, 16, 1, (64, 0), None, 4),
        (8, 1, 512, 16, None, 5.0, 3),
    ],
)
def test_decode_kernel_equals_its_twin(dtype, heads, kv_heads, dim, block, window, cap, splits):
    # Some of these begin or end a chunk.
    lengths = [1, 34, 64, 133, 230]
    query, cache, table, _, seq_lens = make_rows(
        lengths,
        [1] * 5,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        block_size=block,
        dtype=dtype,
    )
    options = {"scale": dim**-0.5, "soft_cap": cap, **reach(window)}
    actual = paged_attention_decode(query, cache, table, seq_lens, num_splits=splits, **options)
    expected = reference.paged_attention_decode(query, cache, table, seq_lens, **options)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("width", "heads", "kv_heads", "dim", "within", "splits", "more"),
    [
        (5, 8, 2, 64, None, 3, {}),
        (2, 4, 4, 32, 37, 4, {"soft_cap": 5.0}),
        (9, 4, 1, 32, (33, 1), 5, {}),
        (3, 2, 1, 64, (16, 0), 1, {"sinks": True}),
        (4, 6, 2, 32, 20, 3, {"alibi_slopes": True, "sinks": True}),
        (4, 6, 2, 32, None, 3, {"distance_bias": True}),
    ],
)
def test_decode_of_several_tokens_per_row_equals_its_twin(
    dtype, width, heads, kv_heads, dim, within, splits, more
):
    """Of a tile or a split, some of a row's queries see nothing: it lies beyond them, or before
    their window."""
    lengths = [width, 34, 64, 65, 133, 230]
    query, cache, table, start, seq_lens = make_rows(
        lengths,
        [width] * len(lengths),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        block_size=8,
        dtype=dtype,
    )
    draw = torch.Generator().manual_seed(3)
    sizes = {"sinks": (heads,), "alibi_slopes": (heads,), "distance_bias": (heads, 40)}
    more = {
        name: torch.randn(sizes[name], generator=draw).to(DEVICE) if name in sizes else value
        for name, value in more.items()
    }
    options = {"scale": dim**-0.5, **reach(within), **more}
    actual = paged_attention_decode(
        query, cache, table, seq_lens, num_splits=splits, width=width, **options
    )
    expected = reference.paged_attention(query, cache, table, start, seq_lens, **options)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("splits", [1, 3])
def test_decode_of_a_padding_row_gives_zeros(splits):
    query, cache, table, _, seq_lens = make_rows(
        [0, 70],
        [1, 1],
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        block_size=4,
        dtype=torch.float32,
    )
    actual = paged_attention_decode(query, cache, table, seq_lens, scale=0.25, num_splits=splits)
    assert torch.equal(actual[0], torch.zeros_like(actual[0]))
    assert actual[1].isfinite().all() and actual[1].abs().max() > 0


def test_decode_refuses_a_small_workspace():
    query, cache, table, _, seq_lens = make_rows(
        [70], [1], num_heads=2, num_kv_heads=1, head_dim=16, block_size=4, dtype=torch.float32
    )
    small = torch.empty(workspace_elements(1, 2, 16, 2) - 1, device=DEVICE)
    with pytest.raises(ValueError, match="workspace"):
        paged_attention_decode(
            query, cache, table, seq_lens, scale=1.0, num_splits=2, workspace=small
        )


def test_splits_fill_the_device_and_never_outnumber_the_work():
    assert choose_num_splits(1, 8, 128, torch.bfloat16, 131072, 132) == 64
    assert choose_num_splits(256, 8, 128, torch.bfloat16, 131072, 132) == 1
    assert choose_num_splits(1, 8, 128, torch.bfloat16, 256, 132) == 4
    assert choose_num_splits(1, 1, 128, torch.bfloat16, 1, 132) == 1
    assert choose_num_splits(32, 8, 128, torch.bfloat16, 131072, 132) == 2


def test_programs_over_narrow_caches_fill_the_card_once() -> None:
    def splits(rows: int) -> int:
        return choose_num_splits(rows, 8, 128, torch.bfloat16, 131072, 132, narrow=True)

    assert [splits(rows) for rows in (1, 8, 19, 32, 256)] == [64, 8, 3, 2, 1]
    for rows in range(1, 66):
        assert 8 * rows * splits(rows) <= 4 * 132
    wide = (torch.float32, 128), (torch.bfloat16, 256)
    for dtype, head_dim in wide:
        args = (8, 8, head_dim, dtype, 131072, 132)
        assert choose_num_splits(*args, narrow=True) == choose_num_splits(*args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "window", "cap"),
    [
        (2, 2, 64, 16, None, None),
        (4, 1, 64, 4, None, None),
        (7, 1, 96, 16, 37, None),
        (6, 2, 80, 16, 50, 5.0),
        (4, 1, 64, 4, (20, 0), None),
        (6, 2, 80, 16, (24, 2), 5.0),
        (2, 1, 128, 32, (64, 0), None),
        (2, 1, 128, 32, None, 30.0),
        (2, 1, 256, 16, None, None),
        (8, 1, 512, 16, None, None),
        (2, 1, 320, 4, 37, 5.0),
    ],
)
def test_prefill_kernel_equals_its_twin(dtype, heads, kv_heads, dim, block, window, cap):
    # Whole prompts, continued chunks, single tokens and an empty row; several tiles in a row.
    lengths, query_lens = [90, 130, 5, 64, 7, 160], [90, 20, 1, 64, 0, 3]
    query, cache, table, start, seq_lens = make_rows(
        lengths,
        query_lens,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        block_size=block,
        dtype=dtype,
    )
    options = {"scale": dim**-0.5, "soft_cap": cap, **reach(window)}
    actual = paged_attention_prefill(
        query, cache, table, start, seq_lens, max_query_len=max(query_lens), **options
    )
    expected = reference.paged_attention(query, cache, table, start, seq_lens, **options)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dim", [32, 512])
@pytest.mark.parametrize("query_len", [1, 4, 9])
def test_prefill_kernel_at_every_tile_height(query_len, dim):
    lengths, query_lens = [40, 75, 9], [query_len] * 3
    query, cache, table, start, seq_lens = make_rows(
        lengths,
        query_lens,
        num_heads=6,
        num_kv_heads=1,
        head_dim=dim,
        block_size=4,
        dtype=DTYPES[1],
    )
    actual = paged_attention_prefill(
        query, cache, table, start, seq_lens, max_query_len=query_len, scale=dim**-0.5
    )
    expected = reference.paged_attention(query, cache, table, start, seq_lens, scale=dim**-0.5)
    torch.testing.assert_close(
        actual, expected, atol=TOLERANCE[DTYPES[1]], rtol=TOLERANCE[DTYPES[1]]
    )


@pytest.mark.parametrize("bias", ["alibi_slopes", "distance_bias"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [None, 37, (30, 1)])
def test_biases_and_sinks(splits, window, bias):
    heads, dim = 6, 32
    biases = {
        "alibi_slopes": torch.linspace(0.01, 0.7, heads, device=DEVICE),
        "distance_bias": torch.linspace(0, 40, heads * 11, device=DEVICE).sin().view(heads, 11),
    }
    options = {
        "scale": 0.2,
        **reach(window),
        bias: biases[bias].to(DTYPES[1]) if bias == "distance_bias" else biases[bias],
        "sinks": torch.linspace(-2.0, 5.0, heads, device=DEVICE, dtype=DTYPES[1]),
    }
    shape = {"num_heads": heads, "num_kv_heads": 2, "head_dim": dim, "block_size": 4}
    query, cache, table, _, seq_lens = make_rows(
        [1, 70, 200], [1] * 3, dtype=torch.float32, **shape
    )
    actual = paged_attention_decode(query, cache, table, seq_lens, num_splits=splits, **options)
    expected = reference.paged_attention_decode(query, cache, table, seq_lens, **options)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    query, cache, table, start, seq_lens = make_rows(
        [90, 70, 5], [90, 20, 1], dtype=torch.float32, **shape
    )
    actual = paged_attention_prefill(
        query, cache, table, start, seq_lens, max_query_len=90, **options
    )
    expected = reference.paged_attention(query, cache, table, start, seq_lens, **options)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def test_prefill_from_a_row_on_leaves_the_rows_before_it_alone():
    query, cache, table, start, seq_lens = make_rows(
        [20, 50, 33],
        [1, 1, 33],
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        block_size=16,
        dtype=torch.float32,
    )
    out = torch.full_like(query, 7.0)
    paged_attention_prefill(
        query,
        cache,
        table,
        start,
        seq_lens,
        max_query_len=33,
        scale=0.25,
        first_row=2,
        num_tokens=33,
        out=out,
    )
    expected = reference.paged_attention(query, cache, table, start, seq_lens, scale=0.25)
    assert torch.equal(out[:2], torch.full_like(out[:2], 7.0))
    torch.testing.assert_close(out[2:], expected[2:], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("decode_lens", "prompts", "padding", "window", "splits"),
    [
        ([40, 1, 133], [(70, 70), (90, 17)], 9, None, 3),
        ([], [(5, 5), (33, 1), (64, 30)], 0, 37, 1),
        ([12, 300], [], 1, None, 2),
        ([9, 70], [(61, 61)], 0, 25, 1),
        ([40, 1, 133], [(70, 70), (90, 17)], 9, (28, 0), 3),
    ],
)
def test_rows_that_the_device_alone_knows_equal_the_twin(
    dtype, decode_lens, prompts, padding, window, splits
):
    """A recorded step: leading rows of one token, then others, bounds and lengths on the device."""
    lengths = [*decode_lens, *(length for length, _ in prompts), *([padding] if padding else [])]
    query_lens = [1] * len(decode_lens) + [n for _, n in prompts] + ([padding] if padding else [])
    query, cache, table, start, seq_lens = make_rows(
        lengths, query_lens, num_heads=4, num_kv_heads=2, head_dim=32, block_size=8, dtype=dtype
    )
    expected = reference.paged_attention(
        query, cache, table, start, seq_lens, scale=0.2, **reach(window)
    )
    num_rows, max_decode_rows = len(decode_lens) + 6, len(decode_lens) + 2
    tokens = int(start[-1])
    start = torch.cat([start, start.new_full((num_rows + 1 - len(start),), tokens)])
    missing = num_rows - len(lengths)
    seq_lens = torch.cat([seq_lens, seq_lens.new_zeros(missing)])
    table = torch.cat([table, table.new_zeros(missing, table.shape[1])])
    bounds = torch.tensor(
        [len(decode_lens), len(lengths) - len(decode_lens)], dtype=torch.int32, device=DEVICE
    )
    more = query.new_zeros(max(0, max_decode_rows - tokens), *query.shape[1:])
    query = torch.cat([query, more])
    actual = torch.full_like(query, float("nan"))
    options = {"scale": 0.2, **reach(window)}
    paged_attention_decode(
        query[:max_decode_rows], cache, table, seq_lens, num_splits=splits,
        out=actual[:max_decode_rows], query_start=start, **options,
    )  # fmt: skip
    paged_attention_prefill(
        query, cache, table, start, seq_lens, max_query_len=tokens, num_tokens=tokens, out=actual,
        bounds=bounds, max_rows=5, **options,
    )  # fmt: skip
    torch.testing.assert_close(
        actual[:tokens].float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert actual[tokens:].isnan().all(), "rows beyond the step were written"
