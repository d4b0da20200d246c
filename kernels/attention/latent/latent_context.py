"""Latent attention of prompts' rows to what their sequences have cached.

Queries are absorbed, as decode rows' are; every query of a row sees all of its cached latents. A
program takes a tile of one row, of tokens and heads together, so that a cached latent is read once
for all of them. A row without a context costs nothing, so the host need not know which rows have
one. `latent_prompt` continues the running softmax over the rows' own tokens.

Operations per head and pair of a query and a token: 2 * (2 * latent_dim + rope_dim).

Source: DeepSeek-V2 (arXiv 2405.04434); Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...launch import launch
from ..levels import LevelRows, level_arguments, level_constants
from ..row_tiles import row_of_tile
from .latent_decode import LatentTiles
from .latent_levels import attend_latents, level_sizes, leveled_latent_tiles


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "stride_table"],
    do_not_specialize_on_alignment=["bounds_ptr"],
)
def _latent_context_kernel(
    out_ptr,
    lse_ptr,
    absorbed_ptr,
    turned_ptr,
    cache_ptr,
    block_table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    bounds_ptr,
    scale,
    first_row,
    num_rows,
    stride_out_token,
    stride_out_head,
    stride_absorbed_token,
    stride_absorbed_head,
    stride_turned_token,
    stride_turned_head,
    stride_block,
    stride_slot,
    stride_table,
    levels_ptr,
    slots_ptr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    BITS_1: tl.constexpr,
    TOKENS_1: tl.constexpr,
    BITS_2: tl.constexpr,
    TOKENS_2: tl.constexpr,
    BITS_3: tl.constexpr,
    TOKENS_3: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    MIXED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    if MIXED:
        first_row = tl.load(bounds_ptr)
        num_rows = tl.load(bounds_ptr + 1)
        if num_rows == 0:
            return
    row, number = row_of_tile(tl.program_id(0), query_start_ptr, first_row, num_rows, BLOCK_Q)
    row_start = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - row_start
    if number * BLOCK_Q >= query_len:
        return

    offs_m = tl.arange(0, BLOCK_M)
    local = number * BLOCK_Q + offs_m // HEADS
    head = tl.program_id(1) * HEADS + offs_m % HEADS
    mask_m = (local < query_len) & (head < NUM_HEADS)
    token = (row_start + local).to(tl.int64)
    at = token * NUM_HEADS + head
    context = tl.load(seq_lens_ptr + row) - query_len
    if context == 0:
        # The sum is undefined: whoever reads it sees that it has no weight.
        tl.store(lse_ptr + at, tl.full([BLOCK_M], -float("inf"), tl.float32), mask=mask_m)
        return
    offs_l = tl.arange(0, BLOCK_L)
    offs_r = tl.arange(0, BLOCK_R)
    mask_l = mask_m[:, None] & (offs_l < LATENT_DIM)[None, :]
    absorbed = tl.load(
        absorbed_ptr
        + token[:, None] * stride_absorbed_token
        + head[:, None].to(tl.int64) * stride_absorbed_head
        + offs_l[None, :],
        mask=mask_l,
        other=0.0,
    )
    turned = tl.load(
        turned_ptr
        + token[:, None] * stride_turned_token
        + head[:, None] * stride_turned_head
        + offs_r[None, :],
        mask=mask_m[:, None] & (offs_r < ROPE_DIM)[None, :],
        other=0.0,
    )
    table = block_table_ptr + row.to(tl.int64) * stride_table
    tiles = leveled_latent_tiles(
        context, levels_ptr, slots_ptr, row, LEVELS, TOKENS_1, TOKENS_2, TOKENS_3, BLOCK_SIZE,
        BLOCK_N,
    )  # fmt: skip
    acc, m, total = attend_latents(
        absorbed, turned, 0, tiles, context, table, cache_ptr, scale, stride_block, stride_slot,
        levels_ptr, slots_ptr, row, LATENT_DIM, ROPE_DIM, BLOCK_SIZE, LEVELS, BITS_1, TOKENS_1,
        BITS_2, TOKENS_2, BITS_3, TOKENS_3, CHANNELS, BLOCK_BYTES, BLOCK_M, BLOCK_N, BLOCK_L,
        BLOCK_R,
    )  # fmt: skip
    acc = acc / total[:, None]
    tl.store(lse_ptr + at, m + tl.log2(total), mask=mask_m)
    target = out_ptr + token[:, None] * stride_out_token + head[:, None] * stride_out_head
    tl.store(target + offs_l[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask_l)


def context_tiles(num_heads: int, latent_dim: int, dtype: torch.dtype) -> LatentTiles:
    if dtype == torch.float32:
        return LatentTiles(max(16, min(32, triton.next_power_of_2(num_heads))), 16, 4, 1)
    return LatentTiles(64, 64, 8, 3)


def latent_context(
    absorbed: torch.Tensor,
    turned: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    first_row: int = 0,
    num_tokens: int | None = None,
    bounds: torch.Tensor | None = None,
    max_rows: int = 0,
    levels: LevelRows | None = None,
    channels: int | None = None,
) -> None:
    """Attend to the tokens before each row's own.

    absorbed: [all_tokens, num_heads, latent_dim], turned: [all_tokens, num_heads, rope_dim]; cache:
    [num_blocks, block_size, latent_dim + rope_dim], of absorbed's type; block_table: [num_rows,
    max_blocks] int32; query_start: [num_rows + 1] int32; seq_lens: [num_rows] int32. Last strides
    are 1, others free. out: the shape of absorbed, gets sums of latents by their weights; lse:
    [all_tokens, num_heads] float32, gets log-sum-exps in units of log2, -inf where nothing is
    cached, and there `out` is left as it is. Rows from `first_row` on, which have `num_tokens` (by
    default all); bounds: [2] int32, first_row and the number of rows, if only the device knows
    them; then `max_rows` is the largest possible number, and tokens of other rows are not written.
    levels, channels: as in `latent_decode`.
    """
    all_tokens, num_heads, latent_dim = absorbed.shape
    rope_dim = turned.shape[-1]
    num_rows = max_rows if bounds is not None else seq_lens.shape[0] - first_row
    num_tokens = all_tokens if num_tokens is None else num_tokens
    if num_rows == 0 or num_tokens == 0:
        return
    tiles = context_tiles(num_heads, latent_dim, absorbed.dtype)
    heads = min(triton.next_power_of_2(num_heads), tiles.block_m)
    num_tiles = num_tokens // (tiles.block_m // heads) + num_rows
    launch(_latent_context_kernel, (num_tiles, triton.cdiv(num_heads, heads)))(
        out,
        lse,
        absorbed,
        turned,
        cache,
        block_table,
        query_start,
        seq_lens,
        seq_lens if bounds is None else bounds,
        scale,
        first_row,
        num_rows,
        out.stride(0),
        out.stride(1),
        absorbed.stride(0),
        absorbed.stride(1),
        turned.stride(0),
        turned.stride(1),
        cache.stride(0),
        cache.stride(1),
        block_table.stride(0),
        *level_arguments(levels, seq_lens),
        NUM_HEADS=num_heads,
        HEADS=heads,
        LATENT_DIM=latent_dim,
        ROPE_DIM=rope_dim,
        BLOCK_SIZE=cache.shape[1],
        **level_constants(() if levels is None else levels.formats),
        **level_sizes(levels, cache, channels),
        MIXED=bounds is not None,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_L=max(16, triton.next_power_of_2(latent_dim)),
        BLOCK_R=max(16, triton.next_power_of_2(rope_dim)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
