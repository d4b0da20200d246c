"""Latent attention of absorbed queries over a paged cache: decode rows, and prompts' contexts.

The query of every head meets the same cached latents, so a program takes a tile of heads (of a
decode row), or of tokens and heads (of a prompt's row): a latent is read once as key and as value
of all of them. Results are normalised and come with their log-sum-exp in units of log2. Decode rows
are also split over their tokens; a second kernel joins the splits.

Operations: 2 * (2 * latent_dim + rope_dim) * num_heads for each pair of a query and a cached token.
Memory: (latent_dim + rope_dim) elements per cached token and tile, the bound of decode up to some
100 heads.

Source: DeepSeek-V2 (arXiv 2405.04434); Dao et al., "Flash-Decoding for long-context inference",
2023.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...launch import launch
from ...pdl import gdc_launch_dependents, gdc_wait, pdl_options
from ..levels import LevelRows, level_arguments, level_constants
from .latent_levels import (
    attend_latents,
    level_sizes,
    leveled_latent_tiles,
)

MAX_SPLITS = 128
MIN_SPLIT_TILES = 2
"""Fewest tiles of tokens per split: with fewer, joining costs more than splitting saves."""
JOINED = 128
"""Channels per program of the joining kernel."""


@triton.jit(do_not_specialize=["num_splits", "stride_table"])
def _latent_decode_kernel(
    out_ptr,
    lse_ptr,
    absorbed_ptr,
    turned_ptr,
    cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_start_ptr,
    scale,
    num_splits,
    stride_out_row,
    stride_out_head,
    stride_absorbed_row,
    stride_absorbed_head,
    stride_turned_row,
    stride_turned_head,
    stride_block,
    stride_slot,
    stride_table,
    levels_ptr,
    slots_ptr,
    NUM_HEADS: tl.constexpr,
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
    SPLIT: tl.constexpr,
    MIXED: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    split = tl.program_id(2)
    if PDL:
        gdc_wait()
    if MIXED:
        # Only the leading rows of one token each are computed.
        if tl.load(query_start_ptr + row + 1) != row + 1:
            return
    length = tl.load(seq_lens_ptr + row)
    tiles = leveled_latent_tiles(
        length, levels_ptr, slots_ptr, row, LEVELS, TOKENS_1, TOKENS_2, TOKENS_3, BLOCK_SIZE,
        BLOCK_N,
    )  # fmt: skip
    per_split = tl.maximum(tl.cdiv(tiles, num_splits), MIN_TILES)
    begin = 0
    end = tiles
    if SPLIT:
        begin = split * per_split
        end = tl.minimum(begin + per_split, tiles)
        if begin >= end:
            return

    head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_l = tl.arange(0, BLOCK_L)
    offs_r = tl.arange(0, BLOCK_R)
    row64 = row.to(tl.int64)
    mask_m = head < NUM_HEADS
    mask_l = mask_m[:, None] & (offs_l < LATENT_DIM)[None, :]
    absorbed = tl.load(
        absorbed_ptr
        + row64 * stride_absorbed_row
        + head[:, None].to(tl.int64) * stride_absorbed_head
        + offs_l[None, :],
        mask=mask_l,
        other=0.0,
    )
    turned = tl.load(
        turned_ptr
        + row64 * stride_turned_row
        + head[:, None] * stride_turned_head
        + offs_r[None, :],
        mask=mask_m[:, None] & (offs_r < ROPE_DIM)[None, :],
        other=0.0,
    )
    table = block_table_ptr + row64 * stride_table
    acc, m, total = attend_latents(
        absorbed, turned, begin, end, length, table, cache_ptr, scale, stride_block, stride_slot,
        levels_ptr, slots_ptr, row, LATENT_DIM, ROPE_DIM, BLOCK_SIZE, LEVELS, BITS_1, TOKENS_1,
        BITS_2, TOKENS_2, BITS_3, TOKENS_3, CHANNELS, BLOCK_BYTES, BLOCK_M, BLOCK_N, BLOCK_L,
        BLOCK_R,
    )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    # A row of length 0 (padding) has total 0 and gives zeros.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if SPLIT:
        at = (row64 * NUM_HEADS + head) * num_splits + split
        tl.store(lse_ptr + at, m + tl.log2(total), mask=mask_m)
        tl.store(out_ptr + at[:, None] * LATENT_DIM + offs_l[None, :], acc, mask=mask_l)
    else:
        target = out_ptr + row64 * stride_out_row + head[:, None] * stride_out_head
        tl.store(target + offs_l[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask_l)


@triton.jit(do_not_specialize=["num_splits"])
def _latent_join_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    seq_lens_ptr,
    query_start_ptr,
    num_splits,
    stride_out_row,
    stride_out_head,
    levels_ptr,
    slots_ptr,
    NUM_HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    TOKENS_1: tl.constexpr,
    TOKENS_2: tl.constexpr,
    TOKENS_3: tl.constexpr,
    MIXED: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_L: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (row, head, BLOCK_L channels): weight its splits by their part of the sum."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    row64 = row.to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if MIXED:
        if tl.load(query_start_ptr + row + 1) != row + 1:
            return
    tiles = leveled_latent_tiles(
        tl.load(seq_lens_ptr + row), levels_ptr, slots_ptr, row, LEVELS, TOKENS_1, TOKENS_2,
        TOKENS_3, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    per_split = tl.maximum(tl.cdiv(tiles, num_splits), MIN_TILES)
    offs_s = tl.arange(0, BLOCK_S)
    offs_l = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)
    live = offs_s < tl.cdiv(tiles, per_split)
    at = (row64 * NUM_HEADS + head) * num_splits + offs_s
    lse = tl.load(lse_ptr + at, mask=live, other=-float("inf"))
    highest = tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.where(highest == -float("inf"), 0.0, highest))
    in_latent = offs_l < LATENT_DIM
    partial = tl.load(
        partial_ptr + at[:, None] * LATENT_DIM + offs_l[None, :],
        mask=live[:, None] & in_latent[None, :],
        other=0.0,
    )
    total = tl.sum(weights, axis=0)
    out = tl.sum(partial * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    target = out_ptr + row64 * stride_out_row + head * stride_out_head + offs_l
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=in_latent)


class LatentTiles(NamedTuple):
    block_m: int
    """Heads, or (token, head) pairs, per tile"""
    block_n: int
    """Cached tokens per tile"""
    num_warps: int
    num_stages: int


def decode_tiles(num_heads: int, latent_dim: int, dtype: torch.dtype) -> LatentTiles:
    wide = latent_dim > 256
    if dtype == torch.float32:
        return LatentTiles(16, 16, 4, 1)
    if num_heads <= 16:
        return LatentTiles(16, 32, 4, 2)
    if num_heads <= 32:
        return LatentTiles(32, 32, 4 if not wide else 8, 3)
    return LatentTiles(64, 64, 8, 3)


def choose_latent_splits(
    num_rows: int,
    num_heads: int,
    latent_dim: int,
    dtype: torch.dtype,
    max_model_len: int,
    num_sms: int,
) -> int:
    """Return the number of splits that gives each multiprocessor at most one program, two for few
    heads.

    Depends only on numbers that are constant in a graph, so an eager step and a captured one run
    the same kernels.
    """
    tiles = decode_tiles(num_heads, latent_dim, dtype)
    programs = num_rows * triton.cdiv(num_heads, tiles.block_m)
    room = (2 if tiles.block_m == 16 else 1) * num_sms // programs
    longest = triton.cdiv(max_model_len, tiles.block_n * MIN_SPLIT_TILES)
    return int(max(1, min(room, longest, MAX_SPLITS)))


def latent_workspace(num_rows: int, num_heads: int, latent_dim: int, num_splits: int) -> int:
    """Return the floats of `latent_decode`'s workspace; 0 if it does not split."""
    return num_rows * num_heads * num_splits * (latent_dim + 1) if num_splits > 1 else 0


def latent_decode(
    absorbed: torch.Tensor,
    turned: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    num_splits: int = 1,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    query_start: torch.Tensor | None = None,
    levels: LevelRows | None = None,
    channels: int | None = None,
) -> torch.Tensor:
    """absorbed: [num_rows, num_heads, latent_dim], turned: [num_rows, num_heads, rope_dim], one
    token per row → the shape of absorbed: sums of latents by their weights.

    cache: [num_blocks, block_size, latent_dim + rope_dim], of absorbed's type (float16, bfloat16 or
    float32); block_table: [num_rows, max_blocks] int32; seq_lens: [num_rows] int32, including the
    query's own token. Last strides are 1, others free. `workspace`: float32, at least
    `latent_workspace(...)`, contents free; None: allocated here. Cache positions beyond a row's
    length are never read. query_start: [at least num_rows + 1] int32; if given, only the leading
    rows with query_start[row + 1] = row + 1 are computed. levels: if the first blocks of rows have
    tokens in fewer bits, of which so many `channels` have a scale and a zero together; each block
    counts as block_size tokens in seq_lens. No host synchronisation; safe to capture.
    """
    num_rows, num_heads, latent_dim = absorbed.shape
    rope_dim = turned.shape[-1]
    out = torch.empty_like(absorbed) if out is None else out
    if num_rows == 0:
        return out
    tiles = decode_tiles(num_heads, latent_dim, absorbed.dtype)
    target = lse = out
    if num_splits > 1:
        needed = latent_workspace(num_rows, num_heads, latent_dim, num_splits)
        if workspace is None:
            workspace = torch.empty(needed, dtype=torch.float32, device=absorbed.device)
        if workspace.numel() < needed:
            raise ValueError(
                f"workspace has {workspace.numel()} elements; {num_rows} rows in {num_splits} "
                f"splits need {needed}"
            )
        target = workspace
        lse = workspace[num_rows * num_heads * num_splits * latent_dim :]
    starts = seq_lens if query_start is None else query_start
    # A kernel that runs beside another stream's has no predecessor to overlap with.
    options = {} if query_start is not None else pdl_options(absorbed.device)
    of_rows = level_arguments(levels, seq_lens)
    constants = level_constants(() if levels is None else levels.formats)
    grid = (num_rows, triton.cdiv(num_heads, tiles.block_m), num_splits)
    launch(_latent_decode_kernel, grid)(
        target,
        lse,
        absorbed,
        turned,
        cache,
        block_table,
        seq_lens,
        starts,
        scale,
        num_splits,
        out.stride(0),
        out.stride(1),
        absorbed.stride(0),
        absorbed.stride(1),
        turned.stride(0),
        turned.stride(1),
        cache.stride(0),
        cache.stride(1),
        block_table.stride(0),
        *of_rows,
        NUM_HEADS=num_heads,
        LATENT_DIM=latent_dim,
        ROPE_DIM=rope_dim,
        BLOCK_SIZE=cache.shape[1],
        **constants,
        **level_sizes(levels, cache, channels),
        SPLIT=num_splits > 1,
        MIXED=query_start is not None,
        MIN_TILES=MIN_SPLIT_TILES,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_L=max(16, triton.next_power_of_2(latent_dim)),
        BLOCK_R=max(16, triton.next_power_of_2(rope_dim)),
        PDL=bool(options),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **options,
    )
    if num_splits > 1:
        joined = min(JOINED, triton.next_power_of_2(latent_dim))
        launch(_latent_join_kernel, (num_rows, num_heads, triton.cdiv(latent_dim, joined)))(
            out,
            target,
            lse,
            seq_lens,
            starts,
            num_splits,
            out.stride(0),
            out.stride(1),
            *of_rows,
            NUM_HEADS=num_heads,
            LATENT_DIM=latent_dim,
            BLOCK_SIZE=cache.shape[1],
            **{name: value for name, value in constants.items() if "BITS" not in name},
            MIXED=query_start is not None,
            MIN_TILES=MIN_SPLIT_TILES,
            BLOCK_N=tiles.block_n,
            BLOCK_S=triton.next_power_of_2(num_splits),
            BLOCK_L=joined,
            PDL=bool(options),
            num_warps=4,
            **options,
        )
    return out
