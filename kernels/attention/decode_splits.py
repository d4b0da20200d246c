"""Splits of a decode row's keys over programs: their number, their tiles, the join of their sums.

The device computes the tiles of each split from the row's length, where it attends and where it
joins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..pdl import gdc_launch_dependents, gdc_wait
from ..tiles import prefetch_weight_l2
from .reach import last_hidden
from .shared_prefix import prefix_length

MAX_SPLITS = 64
MIN_SPLIT_TILES = 2
"""Fewest tiles of keys per split: with fewer, joining costs more than splitting saves."""


class DecodeConfig(NamedTuple):
    block_n: int
    num_warps: int
    num_stages: int


def decode_config(
    head_dim: int, dtype: torch.dtype, programs: int, narrow: bool = False
) -> DecodeConfig:
    """Return the tiles for heads of `head_dim` channels; `programs`: rows times kv heads; `narrow`:
    keys and values of at most 8 bits.

    From sweeps on an H200, of narrow ones on an H100: small tiles hide latency if programs are few;
    many programs hide it themselves.
    """
    if dtype == torch.float32 and head_dim > 256:
        return DecodeConfig(16, 8, 3)
    if dtype == torch.float32 or head_dim > 128:
        return DecodeConfig(32, 4, 3)
    few = programs < 64 if narrow else programs <= 128
    return DecodeConfig(32, 4, 5) if few else DecodeConfig(64, 4, 3)


def choose_num_splits(
    num_rows: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    max_model_len: int,
    num_sms: int,
    narrow: bool = False,
) -> int:
    """Return the number of splits that gives each multiprocessor two programs, four for few rows.

    With `narrow` keys and values (at most 8 bits), instructions bound the kernel and four programs
    fit, so it is four if all of them can run at once. Depends only on numbers that are constant in
    a graph, not on the step's lengths, so an eager step and a captured one run the same kernels.
    """
    programs = num_rows * num_kv_heads
    if narrow and dtype != torch.float32 and head_dim <= 128:
        needed = 4 * num_sms // programs
    else:
        needed = triton.cdiv((4 if 4 * programs <= num_sms else 2) * num_sms, programs)
    tile = decode_config(head_dim, dtype, programs, narrow).block_n
    longest = triton.cdiv(max_model_len, tile * MIN_SPLIT_TILES)
    return int(max(1, min(needed, longest, MAX_SPLITS)))


def workspace_elements(num_rows: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """Return the floats of `paged_attention_decode`'s workspace; 0 if it does not split."""
    return num_rows * num_heads * num_splits * (head_dim + 1) if num_splits > 1 else 0


@triton.jit
def _first_seen(seq_len, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first position that a row's newest token sees."""
    if WINDOW > 0:
        return tl.maximum(last_hidden(seq_len - 1, WINDOW, CHUNK) + 1, 0)
    else:
        return 0


@triton.jit
def _tiles_between(lower, upper, num_splits, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr):
    first = lower // BLOCK_N
    end = tl.cdiv(upper, BLOCK_N)
    return first, end, tl.maximum(tl.cdiv(end - first, num_splits), MIN_TILES)


@triton.jit
def _split_tiles(
    seq_len,
    width,
    prefix,
    num_splits,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return (first visible position, first tile, end tile, tiles per split) of a row's last
    `width` tokens, after a prefix that is attended to elsewhere.

    Computed from the length on the device, so any number of splits is right for any length, and
    a captured graph serves every length.
    """
    lower = tl.maximum(_first_seen(seq_len - (width - 1), WINDOW, CHUNK), prefix)
    first, end, per_split = _tiles_between(lower, seq_len, num_splits, BLOCK_N, MIN_TILES)
    return lower, first, end, per_split


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["prefix_ptr"])
def _join_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    seq_lens_ptr,
    query_start_ptr,
    sinks_ptr,
    prefix_ptr,
    num_splits,
    width,
    stride_out_row,
    stride_out_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
    SHARED: tl.constexpr,
    MIXED: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (token, query head); each row has `width` tokens."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    row64 = row.to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if MIXED:
        if tl.load(query_start_ptr + row + 1) != row + 1:
            return
    seq_len = tl.load(seq_lens_ptr + row // width)
    prefix = prefix_length(prefix_ptr) if SHARED else 0
    _, first, end, per_split = _split_tiles(
        seq_len, width, prefix, num_splits, BLOCK_N, MIN_TILES, WINDOW, CHUNK
    )
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


@triton.jit
def _join(
    out_ptr,
    partial_ptr,
    lse_ptr,
    row,
    kv_head,
    active,
    num_splits,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    dtype: tl.constexpr,
):
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    group = tl.arange(0, BLOCK_G)
    splits = tl.arange(0, BLOCK_S)
    in_group = group < GROUP
    head = kv_head * GROUP + group
    m = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(0, active, BLOCK_S):
        split = start + splits
        live = in_group[:, None] & (split < active)[None, :]
        at = (row * NUM_HEADS + head)[:, None] * num_splits + split[None, :]
        lse = tl.load(lse_ptr + at, mask=live, other=-float("inf"), cache_modifier=".cg")
        # Before the maximum is taken, so that both loads are on their way together.
        part = tl.load(
            partial_ptr + at[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=live[:, :, None] & in_head[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        # Heads beyond the group have no splits.
        m_new = tl.where(in_group, tl.maximum(m, tl.max(lse, axis=1)), 0.0)
        weights = tl.exp2(lse - m_new[:, None])
        decay = tl.exp2(m - m_new)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.sum(part * weights[:, :, None], axis=1)
        m = m_new
    out = acc / tl.where(in_group, total, 1.0)[:, None]
    target = out_ptr + head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(target, out.to(dtype), mask=in_group[:, None] & in_head[None, :])


@triton.jit
def cached_tiles(
    lower,
    seq_len,
    num_splits,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    NEW_TOKEN_PROGRAM: tl.constexpr,
):
    """Return (first tile, end tile, tiles per split) of a row in a fused decode step, from position
    `lower` on; with NEW_TOKEN_PROGRAM the newest token has a split of its own.
    """
    if NEW_TOKEN_PROGRAM:
        newest = seq_len - 1
        first, end, per_split = _tiles_between(lower, newest, num_splits - 1, BLOCK_N, MIN_TILES)
        end = tl.where(lower < newest, end, first)
    else:
        first, end, per_split = _tiles_between(lower, seq_len, num_splits, BLOCK_N, MIN_TILES)
    return first, end, per_split


@triton.jit
def leveled_tiles(
    level_end,
    lower,
    seq_len,
    num_splits,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    NEW_TOKEN_PROGRAM: tl.constexpr,
):
    """Return what `cached_tiles` does for a row whose first `level_end` tiles are of tokens in
    levels; those of the newest tokens, from position `lower` on, follow.
    """
    if NEW_TOKEN_PROGRAM:
        upper = seq_len - 1
        splits = num_splits - 1
    else:
        upper = seq_len
        splits = num_splits
    whole = tl.where(lower < upper, tl.cdiv(upper, BLOCK_N) - lower // BLOCK_N, 0)
    end = level_end + whole
    return 0, end, tl.maximum(tl.cdiv(end, splits), MIN_TILES)


@triton.jit
def prefetch_weights(
    first_weight_ptr, first_bytes, second_weight_ptr, second_bytes, program, num_programs, kv_head,
    is_short, NUM_KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Prefetch weights to the L2 cache where splits are as short as they get (`is_short`): memory
    is idle while these wait for the projection, each other and the join. program: of
    `num_programs` for each kv head"""
    if is_short:
        gdc_wait()
        number = program * NUM_KV_HEADS + kv_head
        count = num_programs * NUM_KV_HEADS
        prefetch_weight_l2(first_weight_ptr, first_bytes, number, count)
        prefetch_weight_l2(second_weight_ptr, second_bytes, number, count)


@triton.jit
def program_tiles(split, first, end, per_split, seq_len, NEW_TOKEN_PROGRAM: tl.constexpr):
    """Return for a program of a fused decode step: its split, first tile and end tile, the number
    of the row's cached splits, whether it attends to the new token, and whether it is idle.

    split: the program's place in its row. With NEW_TOKEN_PROGRAM the first program takes only the
    new token, as split -1, unless the row has at most one split: then split 0 attends to it.
    """
    active = tl.cdiv(end - first, per_split)
    if NEW_TOKEN_PROGRAM:
        split -= 1
        attends_new = (split < 0) == (active > 1)
        begin = tl.where(split < 0, end, first + split * per_split)
        idle = (split < 0) & (active <= 1) | (split > 0) & (begin >= end)
        idle = idle | (split == 0) & (seq_len <= 0)
        attends_new = attends_new & (split <= 0)
    else:
        begin = first + split * per_split
        idle = begin >= end
        attends_new = begin + per_split >= end
    return split, begin, tl.minimum(begin + per_split, end), active, attends_new, idle


@triton.jit
def store_or_join(
    out_ptr,
    partial_ptr,
    lse_ptr,
    counter_ptr,
    acc,
    acc_high,
    m,
    total,
    value_scale,
    row,
    kv_head,
    split,
    active,
    num_splits,
    stride_out,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HALVES: tl.constexpr,
    NEW_TOKEN_PROGRAM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the sums of a group's split, [BLOCK_M, BLOCK_V] with WIDTH channels of values, and with
    HALVES as many of the upper half: to `out_ptr` if it is the row's only one. Otherwise the
    program that finishes last joins all splits.

    split, active: of `program_tiles`; m: [BLOCK_M], in units of log2; total: [BLOCK_M]
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row64 = row.to(tl.int64)
    offs_m = tl.arange(0, acc.shape[0])
    dim = tl.arange(0, acc.shape[1])
    head = kv_head * GROUP + offs_m
    joined = active
    if NEW_TOKEN_PROGRAM:
        joined = tl.where(active > 1, active + 1, 1)
    factor = (value_scale / total)[:, None]
    acc = acc * factor
    mask_out = (offs_m < GROUP)[:, None] & (dim < WIDTH)[None, :]
    if joined == 1:
        target = out_ptr + row64 * stride_out + head[:, None] * HEAD_DIM + dim[None, :]
        tl.store(target, acc.to(dtype), mask=mask_out)
        if HALVES:
            tl.store(target + HALF, (acc_high * factor).to(dtype), mask=mask_out)
        return
    if NEW_TOKEN_PROGRAM:
        split = tl.where(split < 0, active, split)
    at = (row64 * NUM_HEADS + head) * num_splits + split
    tl.store(lse_ptr + at, m + tl.log2(total), mask=offs_m < GROUP)
    partial = partial_ptr + at[:, None] * HEAD_DIM + dim[None, :]
    tl.store(partial, acc, mask=mask_out)
    if HALVES:
        tl.store(partial + HALF, acc_high * factor, mask=mask_out)
    tl.debug_barrier()
    counter = counter_ptr + row * NUM_KV_HEADS + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") != joined - 1:
        return
    tl.store(counter, 0)
    _join(
        out_ptr + row64 * stride_out, partial_ptr, lse_ptr, row64, kv_head, joined, num_splits,
        NUM_HEADS, GROUP, HEAD_DIM, BLOCK_G, BLOCK_S, BLOCK_D, dtype,
    )  # fmt: skip
