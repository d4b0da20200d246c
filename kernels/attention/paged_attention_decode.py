"""Decode attention over a paged cache: one query per row, its keys split over programs.

The query heads that share a key head (GQA) form the rows of one matrix product, so each key and
value is read once. A second kernel joins the splits by their log-sum-exp.

Memory: 2 * sum(seq_lens) * num_kv_heads * head_dim elements read (bound by this), and
num_rows * num_heads * num_splits * (head_dim + 1) floats written and read when split.
Operations: 4 * sum(seq_lens) * num_heads * head_dim.

Source: Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options

MAX_SPLITS = 64
MIN_SPLIT_TILES = 2
"""Fewest tiles of keys per split: with fewer, joining costs more than splitting saves."""


@triton.jit
def _split_tiles(
    seq_len,
    num_splits,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return (first visible position, first tile, end tile, tiles per split) of a row.

    Computed from the length on the device, so any number of splits is right for any length, and
    a captured graph serves every length.
    """
    lower = 0
    if WINDOW > 0:
        lower = tl.maximum(seq_len - WINDOW, 0)
    first = lower // BLOCK_N
    end = tl.cdiv(seq_len, BLOCK_N)
    return lower, first, end, tl.maximum(tl.cdiv(end - first, num_splits), MIN_TILES)


@triton.jit(do_not_specialize=["num_splits", "stride_table"])
def _decode_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_start_ptr,
    slopes_ptr,
    sinks_ptr,
    scale,
    value_scale,
    num_splits,
    stride_out_row,
    stride_out_head,
    stride_query_row,
    stride_query_head,
    stride_block,
    stride_slot,
    stride_head,
    stride_table,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    MIXED: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (row, kv head, split). Scores are kept in units of log2."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if PDL:
        gdc_wait()
    if MIXED:
        # Only the leading rows of one token each are computed.
        if tl.load(query_start_ptr + row + 1) != row + 1:
            return
    seq_len = tl.load(seq_lens_ptr + row)
    lower, first, end, per_split = _split_tiles(seq_len, num_splits, BLOCK_N, MIN_TILES, WINDOW)
    begin_tile = first + split * per_split
    end_tile = tl.minimum(begin_tile + per_split, end)
    if SPLIT:
        if begin_tile >= end_tile:
            return

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    mask_q = (offs_m < GROUP)[:, None] & mask_d[None, :]
    head = kv_head * GROUP + offs_m
    row64 = row.to(tl.int64)
    query = tl.load(
        query_ptr + row64 * stride_query_row + head[:, None] * stride_query_head + offs_d[None, :],
        mask=mask_q,
        other=0.0,
    )

    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = block_table_ptr + row64 * stride_table
    LOG2E: tl.constexpr = 1.4426950408889634
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=offs_m < GROUP, other=0.0)
    for tile in range(begin_tile, end_tile):
        position = tile * BLOCK_N + offs_n
        valid = (position >= lower) & (position < seq_len)
        block = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        base = block * stride_block + (position % BLOCK_SIZE) * stride_slot + kv_head * stride_head
        offsets = base[:, None] + offs_d[None, :]
        mask_kv = valid[:, None] & mask_d[None, :]
        key = tl.load(key_cache_ptr + offsets, mask=mask_kv, other=0.0).to(query.dtype)
        value = tl.load(value_cache_ptr + offsets, mask=mask_kv, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if SOFT_CAP > 0.0:
            scores = SOFT_CAP * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / SOFT_CAP)))
        if ALIBI:
            scores += slope[:, None] * (position - seq_len + 1)[None, :]
        scores = tl.where(valid[None, :], scores * LOG2E, -float("inf"))
        # A tile always holds a visible position, so m_new is finite.
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        weights = tl.exp2(scores - m_new[:, None])
        decay = tl.exp2(m - m_new)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        m = m_new

    if PDL:
        gdc_launch_dependents()
    if SINKS and not SPLIT:
        sink = tl.load(sinks_ptr + head, mask=offs_m < GROUP, other=0.0).to(tl.float32) * LOG2E
        m_new = tl.maximum(m, sink)
        decay = tl.exp2(m - m_new)
        total = total * decay + tl.exp2(sink - m_new)
        acc = acc * decay[:, None]
    # A row of length 0 (padding) has total 0 and gives zeros.
    acc = acc * (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    if SPLIT:
        at = (row64 * NUM_HEADS + head) * num_splits + split
        tl.store(lse_ptr + at, m + tl.log2(total), mask=offs_m < GROUP)
        tl.store(partial_ptr + at[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=mask_q)
    else:
        target = out_ptr + row64 * stride_out_row + head[:, None] * stride_out_head
        tl.store(target + offs_d[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask_q)


@triton.jit(do_not_specialize=["num_splits"])
def _join_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    seq_lens_ptr,
    query_start_ptr,
    sinks_ptr,
    num_splits,
    stride_out_row,
    stride_out_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    MIXED: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (row, query head): weight its splits by their part of the sum."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    row64 = row.to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if MIXED:
        if tl.load(query_start_ptr + row + 1) != row + 1:
            return
    seq_len = tl.load(seq_lens_ptr + row)
    _, first, end, per_split = _split_tiles(seq_len, num_splits, BLOCK_N, MIN_TILES, WINDOW)
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_D)
    live = offs_s < tl.cdiv(end - first, per_split)
    mask_d = offs_d < HEAD_DIM
    at = (row64 * NUM_HEADS + head) * num_splits + offs_s
    lse = tl.load(lse_ptr + at, mask=live, other=-float("inf"))
    highest = tl.max(lse, axis=0)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(highest, sink)
    weights = tl.exp2(lse - tl.where(highest == -float("inf"), 0.0, highest))
    partial = tl.load(
        partial_ptr + at[:, None] * HEAD_DIM + offs_d[None, :],
        mask=live[:, None] & mask_d[None, :],
        other=0.0,
    )
    total = tl.sum(weights, axis=0)
    if SINKS:
        total += tl.exp2(sink - highest)
    out = tl.sum(partial * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    target = out_ptr + row64 * stride_out_row + head * stride_out_head + offs_d
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=mask_d)


class DecodeConfig(NamedTuple):
    """Tiles of decode attention."""

    block_n: int
    """Keys at a time"""
    num_warps: int
    num_stages: int
    """Tiles of keys in flight"""


def decode_config(head_dim: int, dtype: torch.dtype, programs: int) -> DecodeConfig:
    """Return the tiles for heads of `head_dim` channels; `programs`: rows times kv heads.

    From sweeps on an H200: small tiles hide latency if programs are few; many programs hide it
    themselves.
    (Half of `num_stages` is spent on the block table, which is read before the keys.)
    """
    if dtype == torch.float32 or head_dim > 128:
        return DecodeConfig(32, 4, 3)
    return DecodeConfig(32, 4, 5) if programs <= 128 else DecodeConfig(64, 4, 3)


def choose_num_splits(
    num_rows: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    max_model_len: int,
    num_sms: int,
) -> int:
    """Return the number of splits that gives each multiprocessor two programs, four for few rows.

    Depends only on numbers that are constant in a graph, not on the step's lengths, so an eager
    step and a captured one run the same kernels.
    """
    programs = num_rows * num_kv_heads
    needed = triton.cdiv((4 if 4 * programs <= num_sms else 2) * num_sms, programs)
    tile = decode_config(head_dim, dtype, programs).block_n
    longest = triton.cdiv(max_model_len, tile * MIN_SPLIT_TILES)
    return int(max(1, min(needed, longest, MAX_SPLITS)))


def workspace_elements(num_rows: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """Return the floats of `paged_attention_decode`'s workspace; 0 if it does not split."""
    return num_rows * num_heads * num_splits * (head_dim + 1) if num_splits > 1 else 0


def paged_attention_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int = 1,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
    cache_scales: tuple[float, float] = (1.0, 1.0),
    query_start: torch.Tensor | None = None,
) -> torch.Tensor:
    """query: [num_rows, num_heads, head_dim], one token per row → the same shape.

    kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], of query's type (float16,
    bfloat16 or float32), or fp8 that is multiplied by `cache_scales` (keys, values);
    block_table: [num_rows, max_blocks] int32; seq_lens: [num_rows] int32, including the query's
    own token. Last strides are 1, others free. alibi_slopes: [num_heads] float32, times (key's
    position - query's) added to the logits; sinks: [num_heads], one additional logit per head in
    the softmax's sum. `workspace`: float32, at least `workspace_elements(...)`, contents free;
    None: allocated here. Cache positions beyond a row's length, or before its window, are never
    read. query_start: [at least num_rows + 1] int32; if given, only the leading rows with
    query_start[row + 1] = row + 1 are computed. No host synchronisation; safe to capture.
    """
    num_rows, num_heads, head_dim = query.shape
    _, _, block_size, num_kv_heads, _ = kv_cache.shape
    out = torch.empty_like(query) if out is None else out
    if num_rows == 0:
        return out
    group = num_heads // num_kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_n, num_warps, num_stages = config or decode_config(
        head_dim, query.dtype, num_rows * num_kv_heads
    )
    partial = lse = out
    if num_splits > 1:
        needed = workspace_elements(num_rows, num_heads, head_dim, num_splits)
        if workspace is None:
            workspace = torch.empty(needed, dtype=torch.float32, device=query.device)
        if workspace.numel() < needed:
            raise ValueError(
                f"workspace has {workspace.numel()} elements; {num_rows} rows in {num_splits} "
                f"splits need {needed}"
            )
        partial = workspace
        lse = workspace[num_rows * num_heads * num_splits * head_dim :]
    # A kernel that runs beside another stream's has no predecessor to overlap with.
    options = {} if query_start is not None else pdl_options(query.device)
    launch(_decode_kernel, (num_rows, num_kv_heads, num_splits))(
        out,
        partial,
        lse,
        query,
        kv_cache[0],
        kv_cache[1],
        block_table,
        seq_lens,
        seq_lens if query_start is None else query_start,
        seq_lens if alibi_slopes is None else alibi_slopes,
        seq_lens if sinks is None else sinks,
        scale * cache_scales[0],
        cache_scales[1],
        num_splits,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        block_table.stride(0),
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=sliding_window or 0,
        SOFT_CAP=soft_cap or 0.0,
        ALIBI=alibi_slopes is not None,
        SINKS=sinks is not None,
        SPLIT=num_splits > 1,
        MIXED=query_start is not None,
        MIN_TILES=MIN_SPLIT_TILES,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        PDL=bool(options),
        num_warps=num_warps,
        num_stages=num_stages,
        **options,
    )
    if num_splits > 1:
        launch(_join_kernel, (num_rows, num_heads))(
            out,
            partial,
            lse,
            seq_lens,
            seq_lens if query_start is None else query_start,
            seq_lens if sinks is None else sinks,
            num_splits,
            out.stride(0),
            out.stride(1),
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            WINDOW=sliding_window or 0,
            SINKS=sinks is not None,
            MIXED=query_start is not None,
            MIN_TILES=MIN_SPLIT_TILES,
            BLOCK_N=block_n,
            BLOCK_S=triton.next_power_of_2(num_splits),
            BLOCK_D=block_d,
            PDL=bool(options),
            num_warps=4,
            **options,
        )
    return out
