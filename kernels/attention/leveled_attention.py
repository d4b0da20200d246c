"""Causal attention over a paged cache whose older tokens have fewer bits (`core.cache.levels`).

A program takes a tile of one row's queries for one key head, as in the prompt kernel, and a split
of its keys, as in the decode kernel: the tiles of each level's tokens, which all queries see, then
those of the newest tokens, which are as they were computed. So one launch reads all levels, and a
second kernel joins the splits by their log-sum-exp, if there are several.

Memory: each key and value once for each tile of queries, in the bits that it has; codes come with 4
bytes for each token and head. Bound by memory for one query per row, else by products. Operations:
as `paged_attention_prefill`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from .levels import level_columns, level_constants, level_counts, level_numbers, level_tiles
from .quantized_tiles import block_width
from .row_tiles import row_of_tile


class LeveledConfig(NamedTuple):
    block_m: int
    """Rows of a tile: queries times heads of a group."""
    block_n: int
    num_warps: int
    num_stages: int


def leveled_config(
    max_query_len: int, group: int, head_dim: int, dtype: torch.dtype
) -> LeveledConfig:
    """Return the tiles: few different ones, since all must compile before start-up ends."""
    least = max(16, triton.next_power_of_2(group))
    wide = head_dim > 128 or dtype == torch.float32
    if max_query_len * group <= least or head_dim > 256:
        return LeveledConfig(least, 32, 4, 2 if wide else 3)
    return LeveledConfig(max(least, 64), 32 if wide else 64, 4, 2)


@triton.jit
def _fold(acc, m, total, query, key, value, visible, scale, SOFT_CAP: tl.constexpr):
    """Fold a tile of keys, [N, BLOCK_K], into the running softmax. visible: [M, N]"""
    LOG2E: tl.constexpr = 1.4426950408889634
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if SOFT_CAP > 0.0:
        scores = SOFT_CAP * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / SOFT_CAP)))
    scores = tl.where(visible, scores * LOG2E, -float("inf"))
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    # Before its first visible key a query sees none: stay at 0, not NaN.
    pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
    weights = tl.exp2(scores - pivot[:, None])
    decay = tl.exp2(m - pivot)
    total = total * decay + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
    return acc, m_new, total


@triton.jit
def _attend_level(
    acc, m, total, query, key_cache_ptr, value_cache_ptr, table, kv_head, column, count, begin, end,
    scale, BITS: tl.constexpr, TOKENS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_BYTES: tl.constexpr, SOFT_CAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Fold tiles [begin, end) of a level's `count` tokens, whose blocks begin at `column`."""
    offs_n = tl.arange(0, BLOCK_N)
    for tile in range(begin, end):
        place = tile * BLOCK_N + offs_n
        inside = place < count
        block = tl.load(table + column + place // TOKENS, mask=inside, other=0).to(tl.int64)
        place = place % TOKENS
        key = level_numbers(
            key_cache_ptr, block, place, inside, kv_head, BITS, TOKENS, NUM_KV_HEADS, HEAD_DIM,
            BLOCK_BYTES, BLOCK_K, True, query.dtype,
        )  # fmt: skip
        value = level_numbers(
            value_cache_ptr, block, place, inside, kv_head, BITS, TOKENS, NUM_KV_HEADS, HEAD_DIM,
            BLOCK_BYTES, BLOCK_K, False, query.dtype,
        )  # fmt: skip
        acc, m, total = _fold(acc, m, total, query, key, value, inside[None, :], scale, SOFT_CAP)
    return acc, m, total


@triton.jit(
    do_not_specialize=["num_splits", "num_rows", "first_row", "stride_table"],
    do_not_specialize_on_alignment=["levels_ptr", "slots_ptr"],
)
def _leveled_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    levels_ptr,
    slots_ptr,
    sinks_ptr,
    scale,
    num_splits,
    first_row,
    num_rows,
    stride_out_token,
    stride_out_head,
    stride_query_token,
    stride_query_head,
    stride_table,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    LEVELS: tl.constexpr,
    BITS_1: tl.constexpr,
    TOKENS_1: tl.constexpr,
    BITS_2: tl.constexpr,
    TOKENS_2: tl.constexpr,
    BITS_3: tl.constexpr,
    TOKENS_3: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per (tile of BLOCK_M // GROUP queries, kv head, split). Scores are in log2."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    NUM_KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row, number = row_of_tile(tl.program_id(0), query_start_ptr, first_row, num_rows, BLOCK_Q)
    row_start = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - row_start
    tile_start = number * BLOCK_Q
    if tile_start >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + row)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    local = tile_start + offs_m // GROUP
    head = kv_head * GROUP + offs_m % GROUP
    mask_m = (offs_m < BLOCK_Q * GROUP) & (local < query_len)
    in_head = offs_k < HEAD_DIM
    mask_q = mask_m[:, None] & in_head[None, :]
    token = (row_start + local).to(tl.int64)
    source = query_ptr + token[:, None] * stride_query_token + head[:, None] * stride_query_head
    query = tl.load(source + offs_k[None, :], mask=mask_q, other=0.0)

    slot = tl.load(slots_ptr + row).to(tl.int64)
    table = block_table_ptr + row.to(tl.int64) * stride_table
    count_1, count_2, count_3 = level_counts(levels_ptr, slot, LEVELS)
    column_2, column_3, column = level_columns(
        count_1, count_2, count_3, TOKENS_1, TOKENS_2, TOKENS_3
    )
    tiles_1, end_2, end_3 = level_tiles(count_1, count_2, count_3, BLOCK_N)
    # The newest tokens begin at a block; their places are those of the cache.
    lower = column * BLOCK_SIZE
    context = seq_len - query_len
    last = tl.minimum(context + tile_start + BLOCK_Q, seq_len) - 1
    tiles = end_3 + tl.cdiv(last + 1 - lower, BLOCK_N)
    per_split = tl.cdiv(tiles, num_splits)
    begin = split * per_split
    end = tl.minimum(begin + per_split, tiles)

    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    acc, m, total = _attend_level(
        acc, m, total, query, key_cache_ptr, value_cache_ptr, table, kv_head, 0, count_1, begin,
        tl.minimum(end, tiles_1), scale, BITS_1, TOKENS_1, NUM_KV_HEADS, HEAD_DIM, BLOCK_BYTES,
        SOFT_CAP, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if LEVELS > 1:
        acc, m, total = _attend_level(
            acc, m, total, query, key_cache_ptr, value_cache_ptr, table, kv_head, column_2, count_2,
            tl.maximum(begin - tiles_1, 0), tl.minimum(end, end_2) - tiles_1, scale, BITS_2,
            TOKENS_2, NUM_KV_HEADS, HEAD_DIM, BLOCK_BYTES, SOFT_CAP, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if LEVELS > 2:
        acc, m, total = _attend_level(
            acc, m, total, query, key_cache_ptr, value_cache_ptr, table, kv_head, column_3, count_3,
            tl.maximum(begin - end_2, 0), tl.minimum(end, end_3) - end_2, scale, BITS_3, TOKENS_3,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_BYTES, SOFT_CAP, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    position_q = context + local
    for tile in range(tl.maximum(begin - end_3, 0), end - end_3):
        position = lower + tile * BLOCK_N + offs_n
        inside = position <= last
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        place = position % BLOCK_SIZE
        key = level_numbers(
            key_cache_ptr, block, place, inside, kv_head, 16, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM,
            BLOCK_BYTES, BLOCK_K, True, query.dtype,
        )  # fmt: skip
        value = level_numbers(
            value_cache_ptr, block, place, inside, kv_head, 16, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM,
            BLOCK_BYTES, BLOCK_K, False, query.dtype,
        )  # fmt: skip
        visible = inside[None, :] & (position[None, :] <= position_q[:, None])
        acc, m, total = _fold(acc, m, total, query, key, value, visible, scale, SOFT_CAP)

    if SINKS and not SPLIT:
        sink = tl.load(sinks_ptr + head, mask=mask_m, other=0.0).to(tl.float32) * 1.4426950408889634
        m_new = tl.maximum(m, sink)
        decay = tl.exp2(m - m_new)
        total = total * decay + tl.exp2(sink - m_new)
        acc = acc * decay[:, None]
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if SPLIT:
        at = (token * NUM_HEADS + head) * num_splits + split
        tl.store(lse_ptr + at, m + tl.log2(total), mask=mask_m)
        target = partial_ptr + at[:, None] * HEAD_DIM
    else:
        target = out_ptr + token[:, None] * stride_out_token + head[:, None] * stride_out_head
    tl.store(target + offs_k[None, :], acc.to(target.dtype.element_ty), mask=mask_q)


@triton.jit(do_not_specialize=["num_splits"])
def _join_all_kernel(
    out_ptr, partial_ptr, lse_ptr, sinks_ptr, num_splits, stride_out_token, stride_out_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SINKS: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program per (token, head): join all splits, of which empty ones have a lse of -inf."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    offs_s = tl.arange(0, BLOCK_S)
    offs_k = tl.arange(0, BLOCK_K)
    at = (token * NUM_HEADS + head) * num_splits + offs_s
    lse = tl.load(lse_ptr + at, mask=offs_s < num_splits, other=-float("inf"))
    live = lse > -float("inf")
    highest = tl.max(lse, axis=0)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(highest, sink)
    weights = tl.exp2(lse - tl.where(highest == -float("inf"), 0.0, highest))
    part = tl.load(
        partial_ptr + at[:, None] * HEAD_DIM + offs_k[None, :],
        mask=live[:, None] & (offs_k < HEAD_DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weights, axis=0)
    if SINKS:
        total += tl.exp2(sink - highest)
    out = tl.sum(part * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    target = out_ptr + token * stride_out_token + head * stride_out_head + offs_k
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=offs_k < HEAD_DIM)


def leveled_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    levels: torch.Tensor,
    formats: Sequence[tuple[int, int]],
    slots: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    first_row: int = 0,
    num_rows: int | None = None,
    num_tokens: int | None = None,
    num_splits: int = 1,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: LeveledConfig | None = None,
) -> torch.Tensor:
    """query: [all_tokens, num_heads, head_dim] → the same shape; `num_rows` rows from first_row on,
    of `num_tokens` tokens (all by default). With several splits, rows from the first one on, of one
    token each, and `workspace` as for `paged_attention_decode`.

    kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], contiguous, of query's type;
    block_table: [all_rows, max_blocks] int32: the blocks of levels, in order, then whole ones;
    seq_lens: [all_rows] int32, which counts each block of a level as block_size tokens; levels:
    [num_slots, L] int32, tokens in each level, of which formats, [L], gives bits (16, 8 or 4) and
    tokens of a block; slots: [all_rows] int, each row's place in `levels`. A row's queries are the
    last positions of its sequence. Blocks: see `core.nn.kv_cache.level_cache`. No host
    synchronisation; safe to capture.
    """
    all_tokens, num_heads, head_dim = query.shape
    _, _, block_size, num_kv_heads, _ = kv_cache.shape
    out = torch.empty_like(query) if out is None else out
    num_rows = seq_lens.shape[0] - first_row if num_rows is None else num_rows
    num_tokens = all_tokens if num_tokens is None else num_tokens
    if not num_rows or not num_tokens:
        return out
    group = num_heads // num_kv_heads
    block_m, block_n, num_warps, num_stages = config or leveled_config(
        max_query_len, group, head_dim, query.dtype
    )
    partial = lse = out
    if num_splits > 1:
        needed = num_rows * num_heads * num_splits * (head_dim + 1)
        if workspace is None:
            workspace = torch.empty(needed, dtype=torch.float32, device=query.device)
        partial, lse = workspace, workspace[num_rows * num_heads * num_splits * head_dim :]
    block_k = block_width(head_dim)
    num_tiles = num_tokens // (block_m // group) + num_rows
    launch(_leveled_kernel, (num_tiles, num_kv_heads, num_splits))(
        out,
        partial,
        lse,
        query,
        kv_cache[0],
        kv_cache[1],
        block_table,
        query_start,
        seq_lens,
        levels,
        slots,
        seq_lens if sinks is None else sinks,
        scale,
        num_splits,
        first_row,
        num_rows,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_BYTES=block_size * num_kv_heads * head_dim * kv_cache.element_size(),
        **level_constants(tuple(formats)),
        SOFT_CAP=soft_cap or 0.0,
        SINKS=sinks is not None,
        SPLIT=num_splits > 1,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if num_splits > 1:
        block_s = triton.next_power_of_2(num_splits)
        launch(_join_all_kernel, (num_rows, num_heads))(
            out,
            partial,
            lse,
            seq_lens if sinks is None else sinks,
            num_splits,
            out.stride(0),
            out.stride(1),
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            SINKS=sinks is not None,
            BLOCK_S=block_s,
            BLOCK_K=block_k,
            num_warps=4 if block_s * block_k <= 1 << 14 else 8,
        )
    return out
