"""Each kernel of latent attention against its torch twin."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.core.nn.operations import Operations
from jackfield.kernels.attention.latent import reference
from jackfield.kernels.attention.latent.head_matmul import head_matmul
from jackfield.kernels.attention.latent.latent_context import latent_context
from jackfield.kernels.attention.latent.latent_decode import (
    choose_latent_splits,
    latent_decode,
    latent_workspace,
)
from jackfield.kernels.attention.latent.latent_inputs import latent_inputs
from jackfield.kernels.attention.latent.latent_prompt import latent_prompt

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# The interpreter cannot multiply bfloat16.
DTYPES = [torch.float32, torch.bfloat16 if CUDA else torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
SMALL = (5, 40, 6, 12, 10)
"""Heads, latent_dim, rope_dim, nope_dim, value_dim."""
LITE, GLM, V3 = (16, 512, 64, 128, 128), (20, 512, 64, 192, 256), (128, 512, 64, 128, 128)
LARGE = [pytest.param(shape, marks=pytest.mark.gpu) for shape in (LITE, GLM, V3)]
SHAPES = [SMALL, *LARGE]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    bound = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float(), want.float(), atol=bound, rtol=bound)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def paged(lengths: list[int], width: int, dtype: torch.dtype, block_size: int = 16) -> tuple:
    """→ cache [blocks, block_size, width], NaN where no token lies; block table; seq_lens"""
    counts = [-(-length // block_size) for length in lengths]
    order = (
        torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(1)) + 1
    ).tolist()
    cache = torch.full((sum(counts) + 4, block_size, width), float("nan"), dtype=dtype)
    table = torch.zeros(len(lengths), max([*counts, 1]) + 1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for index in range(counts[row]):
            block = order.pop()
            table[row, index] = block
            filled = min(block_size, length - index * block_size)
            cache[block, :filled] = draw(filled, width, dtype=dtype, seed=row * 100 + index).cpu()
    return cache.to(DEVICE), table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("turned", [True, False], ids=["turned", "plain"])
@pytest.mark.parametrize("shape", [SMALL, LARGE[0]], ids=str)
def test_latents_are_normed_rotated_and_cached(dtype, interleaved, turned, shape):
    heads, latent_dim, rope, nope, _ = shape
    fused = draw(3, heads * (nope + rope) + latent_dim + rope + 8, dtype=dtype)
    query = fused[:, : heads * (nope + rope)].unflatten(1, (heads, nope + rope))
    latent = fused[:, heads * (nope + rope) : -8]
    weight = draw(latent_dim, dtype=dtype) + 1
    positions = torch.tensor([0, 7, 31], device=DEVICE)
    angles = torch.rand(40, rope // 2, generator=torch.Generator().manual_seed(1)) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(DEVICE) if turned else None
    slots = torch.tensor([5, 0, 17], device=DEVICE)
    caches = [torch.zeros(6, 4, latent_dim + rope, dtype=dtype, device=DEVICE) for _ in range(2)]
    rest = (weight, 1e-6, positions, cos_sin)
    want = Operations().cached_latents(
        query.clone(), latent.clone(), *rest, caches[0], slots, interleaved=interleaved
    )
    latent_inputs(query, latent, *rest, caches[1], slots, interleaved=interleaved)
    for got, wanted in ((query, want.query), (latent, want.latent), (caches[1], caches[0])):
        close(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_products_of_heads(dtype, tokens):
    x = draw(tokens, 3, 70, dtype=dtype)[:, :, :66]
    weight = draw(3, 100, 66, dtype=dtype) / 8
    close(head_matmul(x, weight.mT), torch.einsum("thk,hnk->thn", x.float(), weight.float()))
    other = weight[:, 10:76, :50]
    close(head_matmul(x, other), torch.einsum("thk,hkn->thn", x.float(), other.float()))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 16, 64])
def test_products_of_many_heads_on_a_gpu(tokens):
    up = draw(16, 256, 512, dtype=torch.bfloat16) / 20
    query = draw(tokens, 16, 192, dtype=torch.bfloat16)[..., :128]
    want = torch.einsum("thk,hkl->thl", query.float(), up[:, :128].float())
    close(head_matmul(query, up[:, :128]), want)
    sums = draw(tokens, 16, 512, dtype=torch.bfloat16)
    want = torch.einsum("thl,hvl->thv", sums.float(), up[:, 128:].float())
    close(head_matmul(sums, up[:, 128:].mT), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_equals_its_twin(dtype, splits, shape):
    heads, latent_dim, rope, *_ = shape
    lengths = [1, 150, 70, 33] if not CUDA else [1, 150, 1500, 33, 0]
    cache, table, seq_lens = paged(lengths, latent_dim + rope, dtype)
    absorbed = draw(len(lengths), heads, latent_dim, dtype=dtype, seed=2)
    turned = draw(len(lengths), heads, rope + 3, dtype=dtype, seed=3)[..., :rope]
    scale = (latent_dim + rope) ** -0.5
    got = latent_decode(absorbed, turned, cache, table, seq_lens, scale=scale, num_splits=splits)
    close(got, reference.latent_decode(absorbed, turned, cache, table, seq_lens, scale=scale))


def test_decode_rows_of_a_mixed_step_alone_are_computed():
    cache, table, seq_lens = paged([20, 40, 30], 46, torch.float32)
    absorbed, turned = draw(4, 5, 40, dtype=torch.float32), draw(4, 5, 6, dtype=torch.float32)
    starts = torch.tensor([0, 1, 2, 4], dtype=torch.int32, device=DEVICE)
    out = torch.full_like(absorbed[:3], 9.0)
    latent_decode(
        absorbed[:3], turned[:3], cache, table, seq_lens, scale=0.2, num_splits=2, out=out,
        query_start=starts,
    )  # fmt: skip
    want = reference.latent_decode(
        absorbed[:2], turned[:2], cache, table[:2], seq_lens[:2], scale=0.2
    )
    close(out[:2], want)
    assert (out[2] == 9.0).all()


def test_a_workspace_that_is_too_small_is_refused():
    cache, table, seq_lens = paged([20], 46, torch.float32)
    absorbed, turned = draw(1, 5, 40, dtype=torch.float32), draw(1, 5, 6, dtype=torch.float32)
    small = torch.empty(latent_workspace(1, 5, 40, 2) - 1, device=DEVICE)
    with pytest.raises(ValueError, match="workspace has 409 elements"):
        latent_decode(
            absorbed, turned, cache, table, seq_lens, scale=1.0, num_splits=2, workspace=small
        )


def test_splits_depend_on_what_a_graph_knows():
    few, some, many = (
        choose_latent_splits(rows, 16, 512, torch.bfloat16, 4096, 132) for rows in (1, 64, 256)
    )
    assert few == 64, "tiles of 32 tokens, at least two a split"
    assert (some, many) == (4, 1), "none waits: two programs for each of 132 multiprocessors"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prompts_equal_their_twins(dtype, on_device, shape):
    """Rows with and without a context, after a decode row; the host may not know which."""
    heads, latent_dim, rope, nope, value = shape
    counts = [1, 40, 3, 1, 9] if not CUDA else [1, 400, 3, 1, 90]
    contexts = [7, 0, 45, 0, 16] if not CUDA else [7, 0, 900, 0, 160]
    lengths = [count + context for count, context in zip(counts, contexts, strict=True)]
    cache, table, seq_lens = paged(lengths, latent_dim + rope, dtype)
    total = sum(counts)
    starts = torch.tensor([0, *counts]).cumsum(0).to(DEVICE, torch.int32)
    absorbed = draw(total, heads, latent_dim, dtype=dtype, seed=2)
    query = draw(total, heads, nope + rope, dtype=dtype, seed=3)
    scale = (nope + rope) ** -0.5 / 3
    more: dict = {"first_row": 1, "num_tokens": total - 1}
    if on_device:
        bounds = torch.tensor([1, 4], dtype=torch.int32, device=DEVICE)
        more = {"bounds": bounds, "max_rows": 6, "num_tokens": total}
    out, want = (torch.full_like(absorbed, 9.0) for _ in range(2))
    lse, want_lse = (torch.full((total, heads), 9.0, device=DEVICE) for _ in range(2))
    own = slice(1, None)
    arguments = (absorbed, query[..., nope:], cache, table, starts, seq_lens)
    latent_context(*arguments, scale=scale, out=out, lse=lse, **more)
    reference.latent_context(*arguments, scale=scale, out=want, lse=want_lse)
    close(out[own], want[own])
    torch.testing.assert_close(lse[own], want_lse[own], atol=2e-2, rtol=1e-3)
    assert (out[0] == 9.0).all() and (lse[0] == 9.0).all(), "the decode row is another kernel's"

    expanded = draw(total, heads, nope + value, dtype=dtype, seed=4)
    shared = draw(total, latent_dim + rope, dtype=dtype, seed=5)[:, latent_dim:]
    for kept in (want_lse, None):
        got = torch.full((total, heads, value), float("nan"), dtype=dtype, device=DEVICE)
        if kept is not None:
            found = draw(total, heads, value, dtype=dtype, seed=6)
            got[kept > float("-inf")] = found[kept > float("-inf")]
        wanted = got.clone()
        latent_prompt(
            query, expanded, shared, starts, scale=scale, max_query_len=max(counts), out=got,
            lse=kept, **more,
        )  # fmt: skip
        reference.latent_prompt(query, expanded, shared, starts, scale=scale, out=wanted, lse=kept)
        close(got[own], wanted[own])


@pytest.mark.slow
@pytest.mark.skipif(CUDA, reason="here, memory that nothing writes costs nothing")
@pytest.mark.parametrize("kernel", ["decode", "context"])
def test_heads_may_be_far_apart(kernel):
    """A library's product of many tokens leaves heads outside of tokens: at 32,768 tokens the last
    of 128 heads is over 2**31 elements away."""
    heads, latent_dim = 17, 16
    far = torch.empty_strided((2, heads, latent_dim), (latent_dim, 1 << 27, 1), dtype=torch.float16)
    near = draw(2, heads, latent_dim, dtype=torch.float16)
    far.copy_(near)
    turned = draw(2, heads, 6, dtype=torch.float16)
    cache, table, lengths = paged([40, 25], latent_dim + 6, torch.float16)
    results = []
    for absorbed in (near, far):
        out = torch.zeros_like(near)
        if kernel == "decode":
            latent_decode(absorbed, turned, cache, table, lengths, scale=0.2, out=out)
        else:
            latent_context(
                absorbed, turned, cache, table, torch.tensor([0, 1, 2], dtype=torch.int32), lengths,
                scale=0.2, out=out, lse=torch.zeros(2, heads),
            )  # fmt: skip
        results.append(out)
    assert torch.equal(*results)
