"""Attention of decode rows to a prefix that they share: the same leading blocks in all of their
tables, read once for all rows.

The queries of all rows that share a key head form the rows of matrix products; the prefix is split
over programs. The decode kernel begins where the prefix ends, and takes in the splits' sums.

Memory: 2 * length * num_kv_heads * head_dim elements read for each tile of queries, and num_rows *
num_heads * num_splits * (head_dim + 1) floats written. Operations: 4 * num_rows * num_heads *
length * head_dim (bound by these, and by a program's latency).

Source: Juravsky et al., "Hydragen: high-throughput LLM inference with shared prefixes", 2024.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_wait, pdl_options
from .decode_floats import soft_capped
from .quantized_tiles import block_width, cache_arguments

LENGTH_UNIT = tl.constexpr(64)
"""Prefixes count in whole units, a multiple of every tile of keys."""
MIN_SPLIT_UNITS = tl.constexpr(4)
"""Fewest units per split."""
MAX_PREFIX_SPLITS = 16
"""More would cost the decode kernel more than they save."""
MAX_PREFIX_HEAD_DIM = 256
"""Channels of heads for whose sums there are registers."""


class PrefixConfig(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class PrefixSums(NamedTuple):
    """What rows have attended to of their prefix, for `paged_attention_decode`."""

    length: torch.Tensor
    """[1] int32: tokens of the prefix; as many as are whole units count."""
    partial: torch.Tensor
    """[num_rows, num_heads, num_splits, head_dim] float32"""
    lse: torch.Tensor
    """[num_rows, num_heads, num_splits] float32, in units of log2"""
    num_splits: int


def prefix_config(head_dim: int, dtype: torch.dtype) -> PrefixConfig:
    """Return the tiles, which are the same for any number of rows."""
    if dtype == torch.float32 or head_dim > 128:
        return PrefixConfig(32, 32, 4, 2)
    return PrefixConfig(64, 64, 4, 3)


def prefix_splits(
    num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
    num_sms: int,
) -> int:  # fmt: skip
    """Return the number of splits that gives each multiprocessor three programs, from sweeps on an
    H200. Depends only on numbers that are constant in a graph."""
    queries = num_rows * (num_heads // num_kv_heads)
    tiles = triton.cdiv(queries, prefix_config(head_dim, dtype).block_m)
    return int(max(2, min(3 * num_sms // (tiles * num_kv_heads), MAX_PREFIX_SPLITS)))


def prefix_elements(num_rows: int, num_heads: int, head_dim: int, num_splits: int) -> int:
    """Return the floats of `attend_prefix`'s workspace."""
    return num_rows * num_heads * num_splits * (head_dim + 1)


@triton.jit
def prefix_length(length_ptr):
    """Return the tokens of a prefix that count."""
    return tl.load(length_ptr) // LENGTH_UNIT * LENGTH_UNIT


@triton.jit
def tokens_per_split(length, num_splits):
    units = length // LENGTH_UNIT
    return tl.maximum(tl.cdiv(units, num_splits), MIN_SPLIT_UNITS) * LENGTH_UNIT


@triton.jit(
    do_not_specialize=["num_rows", "num_splits"], do_not_specialize_on_alignment=["length_ptr"]
)
def _prefix_kernel(
    partial_ptr,
    lse_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    length_ptr,
    bounds_ptr,
    scale,
    num_rows,
    num_splits,
    stride_query_row,
    stride_query_head,
    stride_block,
    stride_slot,
    stride_head,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MIXED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (tile of queries, kv head, split). Scores are in units of log2. MIXED: only
    the first bounds[0] rows are decode rows."""
    first_query = tl.program_id(0) * BLOCK_M
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if PDL:
        gdc_wait()
    length = prefix_length(length_ptr)
    per_split = tokens_per_split(length, num_splits)
    begin = split * per_split
    end = tl.minimum(begin + per_split, length)
    if begin >= end:
        return
    if MIXED:
        num_rows = tl.load(bounds_ptr)
        if first_query >= num_rows * GROUP:
            return

    number = first_query + tl.arange(0, BLOCK_M)
    row = (number // GROUP).to(tl.int64)
    head = kv_head * GROUP + number % GROUP
    used = number < num_rows * GROUP
    offs_n = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    source = query_ptr + (row * stride_query_row + head * stride_query_head)[:, None]
    query = tl.load(source + dim[None, :], mask=used[:, None] & in_head[None, :], other=0.0)
    LOG2E: tl.constexpr = 1.4426950408889634
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in range(begin // BLOCK_N, end // BLOCK_N):
        position = tile * BLOCK_N + offs_n
        block = tl.load(block_table_ptr + position // BLOCK_SIZE).to(tl.int64)
        base = block * stride_block + (position % BLOCK_SIZE) * stride_slot + kv_head * stride_head
        places = base[:, None] + dim[None, :]
        if HEAD_DIM == BLOCK_D:
            key = tl.load(key_cache_ptr + places)
            value = tl.load(value_cache_ptr + places)
        else:
            key = tl.load(key_cache_ptr + places, mask=in_head[None, :], other=0.0)
            value = tl.load(value_cache_ptr + places, mask=in_head[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if SOFT_CAP > 0.0:
            scores = soft_capped(scores * scale, SOFT_CAP) * LOG2E
        else:
            scores = scores * (scale * LOG2E)
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        weights = tl.exp2(scores - m_new[:, None])
        decay = tl.exp2(m - m_new)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        acc += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        m = m_new

    # The decode kernel's long programs start when all of these have ended: beside them, they would
    # crowd on some multiprocessors.
    at = (row * NUM_HEADS + head) * num_splits + split
    tl.store(lse_ptr + at, m + tl.log2(total), mask=used)
    target = partial_ptr + at[:, None] * HEAD_DIM + dim[None, :]
    tl.store(target, acc / total[:, None], mask=used[:, None] & in_head[None, :])


@triton.jit
def prefix_sums(
    partial_ptr,
    lse_ptr,
    length,
    token,
    head,
    used,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Join a prefix's splits → acc [BLOCK_M, BLOCK_D], m and total [BLOCK_M] of these heads."""
    dim = tl.arange(0, BLOCK_D)
    mask = used[:, None] & (dim < HEAD_DIM)[None, :]
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for split in range(0, tl.cdiv(length, tokens_per_split(length, num_splits))):
        at = (token * NUM_HEADS + head) * num_splits + split
        # Zeros for heads beyond the group, so that nothing of theirs is infinite.
        lse = tl.load(lse_ptr + at, mask=used, other=0.0)
        part = tl.load(partial_ptr + at[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        m_new = tl.maximum(m, lse)
        weight = tl.exp2(lse - m_new)
        decay = tl.exp2(m - m_new)
        total = total * decay + weight
        acc = acc * decay[:, None] + part * weight[:, None]
        m = m_new
    return acc, m, total


def attend_prefix(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    length: torch.Tensor,
    *,
    scale: float,
    num_splits: int,
    soft_cap: float | None = None,
    workspace: torch.Tensor | None = None,
    bounds: torch.Tensor | None = None,
    config: PrefixConfig | None = None,
) -> PrefixSums:
    """Attend to the prefix of all rows. query: [num_rows, num_heads, head_dim]

    kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], of query's type. block_table:
    [num_rows, max_blocks] int32, of which all rows begin with the same blocks; length: [1] int32,
    the tokens in them, fewer than any row has, or 0. bounds: [at least 1] int32; if given, only the
    first bounds[0] rows are computed. workspace: float32, at least `prefix_elements`, contents
    free; None: allocated here. No host synchronisation; safe to capture.
    """
    num_rows, num_heads, head_dim = query.shape
    cache = cache_arguments(kv_cache)
    group = num_heads // cache.num_kv_heads
    config = config or prefix_config(head_dim, query.dtype)
    needed = prefix_elements(num_rows, num_heads, head_dim, num_splits)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=query.device)
    if workspace.numel() < needed:
        raise ValueError(
            f"workspace has {workspace.numel()} elements; {num_rows} rows in {num_splits} splits "
            f"need {needed}"
        )
    lse = workspace[num_rows * num_heads * num_splits * head_dim :]
    # A kernel that runs beside another stream's has no predecessor to overlap with.
    options = {} if bounds is not None else pdl_options(query.device)
    grid = (triton.cdiv(num_rows * group, config.block_m), cache.num_kv_heads, num_splits)
    launch(_prefix_kernel, grid)(
        workspace,
        lse,
        query,
        cache.keys,
        cache.values,
        block_table,
        length,
        length if bounds is None else bounds,
        scale,
        num_rows,
        num_splits,
        query.stride(0),
        query.stride(1),
        *cache.strides,
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.block_size,
        SOFT_CAP=soft_cap or 0.0,
        MIXED=bounds is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=block_width(head_dim),
        PDL=bool(options),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **options,
    )
    return PrefixSums(length, workspace, lse, num_splits)
