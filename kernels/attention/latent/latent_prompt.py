"""Latent attention of prompts' rows to their own tokens, causally, with keys and values in full.

It continues the running softmax of `latent_context`, of rows that have one. A program takes a tile
of one row: one head's tokens.

Operations per head and pair of a query and a token that it sees: 2 * (nope_dim + rope_dim +
value_dim).

Source: DeepSeek-V2 (arXiv 2405.04434); Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...launch import launch
from ..row_tiles import row_of_tile, tiles_of_rows
from .latent_decode import LatentTiles


@triton.jit
def _attend_prompt(
    acc,
    m,
    total,
    query,
    turned,
    local_q,
    begin,
    end,
    query_len,
    row_start,
    head,
    expanded_ptr,
    shared_ptr,
    scale,
    stride_expanded_token,
    stride_expanded_head,
    stride_shared,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold a row's own tokens of tiles [begin, end) into the running softmax. Without MASKED every
    query of the tile sees all of them."""
    LOG2E: tl.constexpr = 1.4426950408889634
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_r = tl.arange(0, BLOCK_R)
    offs_v = tl.arange(0, BLOCK_V)
    for tile in range(begin, end):
        place = tile * BLOCK_N + offs_n
        token = (row_start + place).to(tl.int64)
        entry = expanded_ptr + token * stride_expanded_token + head * stride_expanded_head
        mask_k = (offs_k < NOPE_DIM)[None, :]
        mask_r = (offs_r < ROPE_DIM)[None, :]
        mask_v = (offs_v < VALUE_DIM)[None, :]
        if MASKED:
            valid = (place < query_len)[:, None]
            mask_k = mask_k & valid
            mask_r = mask_r & valid
            mask_v = mask_v & valid
        key = tl.load(entry[:, None] + offs_k[None, :], mask=mask_k, other=0.0)
        value = tl.load(entry[:, None] + NOPE_DIM + offs_v[None, :], mask=mask_v, other=0.0)
        shared = tl.load(
            shared_ptr + (token * stride_shared)[:, None] + offs_r[None, :], mask=mask_r, other=0.0
        )
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(shared), scores, input_precision="ieee")
        scores = scores * (scale * LOG2E)
        if MASKED:
            scores = tl.where(place[None, :] <= local_q[:, None], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        # A query that has seen nothing stays at 0, not NaN.
        pivot = m_new
        if MASKED:
            pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
        weights = tl.exp2(scores - pivot[:, None])
        decay = tl.exp2(m - pivot)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
        m = m_new
    return acc, m, total


@triton.jit(
    do_not_specialize=["first_row", "num_rows"], do_not_specialize_on_alignment=["bounds_ptr"]
)
def _latent_prompt_kernel(
    out_ptr,
    lse_ptr,
    query_ptr,
    expanded_ptr,
    shared_ptr,
    query_start_ptr,
    bounds_ptr,
    scale,
    first_row,
    num_rows,
    stride_out_token,
    stride_out_head,
    stride_query_token,
    stride_query_head,
    stride_expanded_token,
    stride_expanded_head,
    stride_shared,
    NUM_HEADS: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CONTEXT: tl.constexpr,
    MIXED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    # Later tiles see more tokens: start them first.
    if MIXED:
        first_row = tl.load(bounds_ptr)
        num_rows = tl.load(bounds_ptr + 1)
        if num_rows == 0:
            return
        # There may be many times more programs than tiles: those without one come last.
        used = tiles_of_rows(query_start_ptr, first_row, num_rows, BLOCK_M)
        tile = used - 1 - tl.program_id(1)
        if tile < 0:
            return
    else:
        tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row, number = row_of_tile(tile, query_start_ptr, first_row, num_rows, BLOCK_M)
    row_start = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - row_start
    if number * BLOCK_M >= query_len:
        return

    local = number * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    offs_r = tl.arange(0, BLOCK_R)
    offs_v = tl.arange(0, BLOCK_V)
    mask_m = local < query_len
    token = (row_start + local).to(tl.int64)
    source = query_ptr + token * stride_query_token + head * stride_query_head
    query = tl.load(
        source[:, None] + offs_k[None, :],
        mask=mask_m[:, None] & (offs_k < NOPE_DIM)[None, :],
        other=0.0,
    )
    turned = tl.load(
        source[:, None] + NOPE_DIM + offs_r[None, :],
        mask=mask_m[:, None] & (offs_r < ROPE_DIM)[None, :],
        other=0.0,
    )
    mask_v = mask_m[:, None] & (offs_v < VALUE_DIM)[None, :]
    target = out_ptr + token * stride_out_token + head * stride_out_head
    target = target[:, None] + offs_v[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if CONTEXT:
        # What the context gave has the weight that its log-sum-exp says; if none, it is undefined.
        m = tl.load(lse_ptr + token * NUM_HEADS + head, mask=mask_m, other=-float("inf"))
        seen = m > -float("inf")
        total = tl.where(seen, 1.0, 0.0)
        acc = tl.load(target, mask=mask_v & seen[:, None], other=0.0).to(tl.float32)
    first = number * BLOCK_M
    full = (first + 1) // BLOCK_N
    end = tl.cdiv(tl.minimum(first + BLOCK_M, query_len), BLOCK_N)
    acc, m, total = _attend_prompt(
        acc, m, total, query, turned, local, 0, full, query_len, row_start, head, expanded_ptr,
        shared_ptr, scale, stride_expanded_token, stride_expanded_head, stride_shared, NOPE_DIM,
        ROPE_DIM, VALUE_DIM, BLOCK_N, BLOCK_K, BLOCK_R, BLOCK_V, False,
    )  # fmt: skip
    acc, m, total = _attend_prompt(
        acc, m, total, query, turned, local, full, end, query_len, row_start, head, expanded_ptr,
        shared_ptr, scale, stride_expanded_token, stride_expanded_head, stride_shared, NOPE_DIM,
        ROPE_DIM, VALUE_DIM, BLOCK_N, BLOCK_K, BLOCK_R, BLOCK_V, True,
    )  # fmt: skip
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=mask_v)


def prompt_tiles(max_query_len: int, key_dim: int, dtype: torch.dtype) -> LatentTiles:
    """Return the tiles of `latent_prompt`: few different ones limit compilations."""
    if dtype == torch.float32:
        return LatentTiles(32, 32, 4, 1)
    if max_query_len <= 64 or key_dim > 256:
        return LatentTiles(64, 32 if key_dim > 256 else 64, 8 if key_dim > 256 else 4, 2)
    return LatentTiles(128, 64, 8, 3 if key_dim <= 192 else 2)


def latent_prompt(
    query: torch.Tensor,
    expanded: torch.Tensor,
    shared: torch.Tensor,
    query_start: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    first_row: int = 0,
    num_tokens: int | None = None,
    num_rows: int | None = None,
    bounds: torch.Tensor | None = None,
    max_rows: int = 0,
) -> None:
    """Attend to each row's own tokens, causally.

    query: [all_tokens, num_heads, nope_dim + rope_dim]; expanded: [all_tokens, num_heads, nope_dim
    + value_dim], each head's part of the keys, then its values; shared: [all_tokens, rope_dim], the
    part that all heads share; query_start: [num_rows + 1] int32. Last strides are 1, others free.
    out: [all_tokens, num_heads, value_dim]; lse: [all_tokens, num_heads] float32 of what `out`
    holds already, in units of log2, -inf for nothing; None: it holds nothing. first_row,
    num_tokens, bounds, max_rows: as for `latent_context`. With `max_query_len`, of any row, they
    size the launch.
    """
    all_tokens, num_heads, key_dim = query.shape
    rope_dim, value_dim = shared.shape[1], out.shape[2]
    nope_dim = key_dim - rope_dim
    if bounds is not None:
        num_rows = max_rows
    elif num_rows is None:
        num_rows = query_start.shape[0] - 1 - first_row
    num_tokens = all_tokens if num_tokens is None else num_tokens
    if num_rows == 0 or num_tokens == 0:
        return
    tiles = prompt_tiles(max_query_len, key_dim, query.dtype)
    launch(_latent_prompt_kernel, (num_heads, num_tokens // tiles.block_m + num_rows))(
        out,
        out if lse is None else lse,
        query,
        expanded,
        shared,
        query_start,
        query_start if bounds is None else bounds,
        scale,
        first_row,
        num_rows,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        expanded.stride(0),
        expanded.stride(1),
        shared.stride(0),
        NUM_HEADS=num_heads,
        NOPE_DIM=nope_dim,
        ROPE_DIM=rope_dim,
        VALUE_DIM=value_dim,
        CONTEXT=lse is not None,
        MIXED=bounds is not None,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=max(16, triton.next_power_of_2(nope_dim)),
        BLOCK_R=max(16, triton.next_power_of_2(rope_dim)),
        BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
