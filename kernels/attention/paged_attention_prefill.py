"""Causal attention of ragged rows over a paged cache: prefill, chunked prefill or mixed steps.

A program takes a tile of one row's queries for one key head. The query heads that share the key
head (GQA) are packed into the tile's rows, token-major, so each key is read once for all of them.

Operations: 4 * head_dim * num_heads * sum over queries of the keys each one sees, plus what a
tile of BLOCK_M / group queries by BLOCK_N keys rounds up; blocks beyond the diagonal, or before the
window or chunks, are skipped. Memory: query and output once, and each row's keys and values once
for each of its query tiles (from the L2 cache, mostly).

With heads of more than 256 channels, registers cannot hold a tile's sums for all value channels. So
each half has its own program, which computes the scores again: half as many operations more.

Source: Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from .prefill_softmax import _attend, _first_value
from .quantized_tiles import (
    Quantized,
    block_width,
    cache_arguments,
    product_dtype,
    product_query,
)
from .reach import last_hidden, reach_constants
from .row_tiles import row_of_tile, tiles_of_rows

try:
    from . import hopper_prefill as hopper
except ImportError:  # A Triton without Gluon, or with another one.
    hopper = None  # type: ignore[assignment]


@triton.jit
def _channels(first, BITS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return the channel of each column of a tile in `dequantized`'s order, and which exist. first:
    the stored head's column at which the tile begins.
    """
    if BITS == 4:
        column = tl.arange(0, 2 * BLOCK)
        stored = first + column % BLOCK
        return column // BLOCK * WIDTH + stored, stored < WIDTH
    else:
        column = first + tl.arange(0, BLOCK)
        return column, column < WIDTH


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "stride_table"],
    do_not_specialize_on_alignment=["bounds_ptr"],
)
def _prefill_kernel(
    out_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_words_ptr,
    value_words_ptr,
    block_table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    bounds_ptr,
    slopes_ptr,
    sinks_ptr,
    scale,
    value_scale,
    first_row,
    num_rows,
    stride_out_token,
    stride_out_head,
    stride_query_token,
    stride_query_head,
    stride_block,
    stride_slot,
    stride_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DISTANCES: tl.constexpr,
    SINKS: tl.constexpr,
    MIXED: tl.constexpr,
    UNIFORM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
):
    """One program per (tile of BLOCK_M // GROUP queries, kv head, part of the values' channels), or
    with MIXED (kv head, tile, part). Scores are in units of log2. UNIFORM: keys are masked in all
    tiles, not only where a query of the tile does not see one, so that a query's arithmetic is the
    same in any tile."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # Later tiles see more keys: start them first.
    if MIXED:
        # There may be many times more programs than tiles: those without one come last.
        kv_head = tl.program_id(0)
        first_row = tl.load(bounds_ptr)
        num_rows = tl.load(bounds_ptr + 1)
        if num_rows == 0:
            return
        used = tiles_of_rows(query_start_ptr, first_row, num_rows, BLOCK_Q)
        tile = used - 1 - tl.program_id(1)
        if tile < 0:
            return
    else:
        kv_head = tl.program_id(1)
        tile = tl.num_programs(0) - 1 - tl.program_id(0)

    row, number = row_of_tile(tile, query_start_ptr, first_row, num_rows, BLOCK_Q)
    row_start = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - row_start
    tile_start = number * BLOCK_Q
    if tile_start >= query_len:
        return

    seq_len = tl.load(seq_lens_ptr + row)
    offs_m = tl.arange(0, BLOCK_M)
    offs_k, in_key = _channels(0, KEY_BITS, KEY_WIDTH, BLOCK_K)
    first_value = _first_value(BLOCK_V, VALUE_PARTS)
    offs_v, in_value = _channels(first_value, VALUE_BITS, VALUE_WIDTH, BLOCK_V)
    local = tile_start + offs_m // GROUP
    head = kv_head * GROUP + offs_m % GROUP
    mask_m = (offs_m < BLOCK_Q * GROUP) & (local < query_len)
    mask_q = mask_m[:, None] & in_key[None, :]
    token = (row_start + local).to(tl.int64)
    source = query_ptr + token[:, None] * stride_query_token + head[:, None] * stride_query_head
    source += offs_k[None, :]
    query = tl.load(source, mask=mask_q, other=0.0)
    if KEY_BITS == 16 and BLOCK_K <= 256:
        # Converted queries stay in registers, of which wide heads leave few.
        query = product_query(query, product_dtype(key_cache_ptr.dtype.element_ty, query.dtype))

    # first, last: cache positions of the tile's queries. Every query sees keys
    # after last_hidden(last) up to first; some query sees keys after last_hidden(first) up to last.
    context = seq_len - query_len
    first = context + tile_start
    last = tl.minimum(first + BLOCK_Q, seq_len) - 1
    position_q = context + local
    end = last // BLOCK_N + 1
    full_end = (first + 1) // BLOCK_N
    lower = 0
    begin = 0
    full_begin = 0
    if WINDOW > 0:
        lower = tl.maximum(last_hidden(first, WINDOW, CHUNK) + 1, 0)
        begin = lower // BLOCK_N
        seen_by_all = tl.maximum(last_hidden(last, WINDOW, CHUNK) + 1, 0)
        full_begin = tl.minimum(tl.cdiv(seen_by_all, BLOCK_N), end)

    acc = tl.zeros([BLOCK_M, 2 * BLOCK_V if VALUE_BITS == 4 else BLOCK_V], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    LOG2E: tl.constexpr = 1.4426950408889634
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=mask_m, other=0.0)
    if DISTANCES > 0:
        # Where the biases of the query's head begin.
        slope = slopes_ptr + head * DISTANCES
    if SINKS:
        # The sink acts as a key that every query sees, with this logit and a value of zeros.
        m = tl.load(sinks_ptr + head, mask=mask_m, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    table = block_table_ptr + row.to(tl.int64) * stride_table
    key_base = key_cache_ptr + kv_head * stride_head
    if VALUE_BITS < KEY_BITS:
        value_base = value_cache_ptr + kv_head * (stride_head >> 1)
    else:
        value_base = value_cache_ptr + kv_head * stride_head
    tail = begin
    if not UNIFORM:
        if WINDOW > 0:
            acc, m, total = _attend(
                acc, m, total, query, position_q,
                begin, full_begin, key_base, value_base, key_words_ptr, value_words_ptr, kv_head,
                table, lower, seq_len, slope, scale, stride_block, stride_slot, NUM_KV_HEADS,
                KEY_BITS, VALUE_BITS, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, WINDOW, CHUNK, SOFT_CAP,
                ALIBI, DISTANCES, BLOCK_N, BLOCK_K, BLOCK_V, VALUE_PARTS, True,
            )  # fmt: skip
        acc, m, total = _attend(
            acc, m, total, query, position_q,
            full_begin, full_end, key_base, value_base, key_words_ptr, value_words_ptr, kv_head,
            table, lower, seq_len, slope, scale, stride_block, stride_slot, NUM_KV_HEADS,
            KEY_BITS, VALUE_BITS, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, WINDOW, CHUNK, SOFT_CAP,
            ALIBI, DISTANCES, BLOCK_N, BLOCK_K, BLOCK_V, VALUE_PARTS, False,
        )  # fmt: skip
        tail = tl.maximum(full_begin, full_end)
    acc, m, total = _attend(
        acc, m, total, query, position_q,
        tail, end, key_base, value_base, key_words_ptr, value_words_ptr, kv_head,
        table, lower, seq_len, slope, scale, stride_block, stride_slot, NUM_KV_HEADS,
        KEY_BITS, VALUE_BITS, KEY_WIDTH, VALUE_WIDTH, BLOCK_SIZE, WINDOW, CHUNK, SOFT_CAP,
        ALIBI, DISTANCES, BLOCK_N, BLOCK_K, BLOCK_V, VALUE_PARTS, True,
    )  # fmt: skip

    factor = (value_scale / tl.where(total > 0.0, total, 1.0))[:, None]
    acc = acc * factor
    mask_out = mask_m[:, None] & in_value[None, :]
    target = out_ptr + token[:, None] * stride_out_token + head[:, None] * stride_out_head
    target += offs_v[None, :]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=mask_out)


class PrefillConfig(NamedTuple):
    block_m: int
    """Rows of a tile: queries times heads of a group"""
    block_n: int
    num_warps: int
    num_stages: int
    value_parts: int = 1
    """Programs that share a tile's value channels"""


HOPPER_SMALL_ROWS = 512
"""Tokens of a row times heads of a group up to which hopper_prefill.py has too large tiles."""
MIXED_SMALL_ROWS = 4096
"""Tokens times heads of a group up to which recorded steps take small tiles. Measured on an H200
and an H100 (kernels.jsonl, `prompt attention by tiles`)."""


def prefill_config(
    max_query_len: int, group: int, head_dim: int, dtype: torch.dtype, mixed: bool, quantized: bool
) -> PrefillConfig:
    """Return the tiles: few different ones, and fewer still for `mixed` rows, whose kernels must
    all compile before start-up ends.
    """
    least = max(16, triton.next_power_of_2(group))
    rows = max_query_len * group
    if head_dim > 256:
        return _wide_config(max(rows, least), least, dtype)
    if dtype == torch.float32:
        return PrefillConfig(max(least, 32), 32, 4, 2)
    if rows <= 16:
        return PrefillConfig(least, 64 if head_dim <= 128 else 32, 4, 3)
    small = 64
    if mixed:
        small = 128 if quantized else MIXED_SMALL_ROWS
    if rows <= small:
        return PrefillConfig(max(least, 64), 64 if head_dim <= 128 else 32, 4, 3)
    if head_dim > 128:
        return PrefillConfig(max(least, 64), 32, 4, 3)
    if rows <= 128:
        # Scales and zeros need registers, too.
        return PrefillConfig(max(least, 128), 64, 8 if quantized else 4, 3)
    return PrefillConfig(256, 64, 8, 3)


def uniform_config(group: int, head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """Return the tiles for rows of any lengths, decode rows included."""
    least = max(16, triton.next_power_of_2(group))
    if head_dim > 256:
        return _wide_config(max(least, 32), least, dtype)
    if dtype == torch.float32:
        return PrefillConfig(max(least, 32), 32, 4, 2)
    return PrefillConfig(max(least, 64), 64 if head_dim <= 128 else 32, 4, 3)


def _wide_config(rows: int, least: int, dtype: torch.dtype) -> PrefillConfig:
    """Return the tiles for heads of more than 256 channels: the largest that fit Hopper's 227 KB of
    shared memory and 255 registers.
    """
    if dtype == torch.float32:
        return PrefillConfig(least, 16, 8, 2, 2)
    if rows <= 16:
        return PrefillConfig(16, 32, 8, 3)
    return PrefillConfig(32 if rows <= 32 else 128, 32, 8, 3, 2)


def has_hopper_kernel(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Return whether there is a kernel for this device's asynchronous units and heads of this size
    over caches of `dtype`; it takes most rows."""
    return hopper is not None and hopper.takes_heads(dtype, head_dim, device)


def paged_attention_prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor | Quantized,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    chunk_lookback: int = 0,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    distance_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    first_row: int = 0,
    num_tokens: int | None = None,
    out: torch.Tensor | None = None,
    cache_scales: tuple[float, float] = (1.0, 1.0),
    bounds: torch.Tensor | None = None,
    max_rows: int = 0,
    config: PrefillConfig | None = None,
    uniform: bool = False,
    portable: bool = False,
) -> torch.Tensor:
    """query: [all_tokens, num_heads, head_dim] → the same shape; rows from first_row on.

    kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], of query's type (float16,
    bfloat16 or float32), or fp8 that is multiplied by `cache_scales` (keys, values); or quantized;
    block_table: [num_rows, max_blocks] int32; query_start: [num_rows + 1] int32, row r's tokens in
    query; seq_lens: [num_rows] int32. A row's queries are the last positions of its sequence. Last
    strides are 1, others free. `num_tokens`: tokens of the computed rows (all of query's by
    default); with max_query_len it sizes the launch. alibi_slopes: [num_heads] float32, times
    (key's position - query's) added to the logits; distance_bias, in place of them: [num_heads,
    num_distances], contiguous, added by the distance to the key, the last one from there on; sinks:
    [num_heads], one additional logit per head in the softmax's sum. Cache positions beyond a row's
    length or before its first query's window or chunks are never read. bounds: [2] int32, first_row
    and the number of rows, if only the device knows them; then `max_rows` is the largest possible
    number of rows, and tokens of other rows are not written. `uniform`: a query's result does not
    depend, in any bit, on how its sequence is divided into launches, nor on other rows.
    `portable`: by the kernel for any GPU. No host synchronisation.
    """
    all_tokens, num_heads, head_dim = query.shape
    cache = cache_arguments(kv_cache)
    key_width, value_width = cache.key_width(head_dim), cache.value_width(head_dim)
    num_kv_heads = cache.num_kv_heads
    out = torch.empty_like(query) if out is None else out
    num_rows = max_rows if bounds is not None else seq_lens.shape[0] - first_row
    num_tokens = all_tokens if num_tokens is None else num_tokens
    if num_rows == 0 or num_tokens == 0:
        return out
    group = num_heads // num_kv_heads
    reach: dict[str, Any] = {
        "sliding_window": sliding_window,
        "attention_chunk_size": attention_chunk_size,
        "chunk_lookback": chunk_lookback,
    }
    small = MIXED_SMALL_ROWS if bounds is not None else HOPPER_SMALL_ROWS
    if (
        isinstance(kv_cache, torch.Tensor)
        and config is None
        and not (uniform or portable)
        and alibi_slopes is None
        and distance_bias is None
        and max_query_len * group > small
        and hopper is not None
        and hopper.takes(query, kv_cache)
    ):
        try:
            return hopper.hopper_prefill(
                query, kv_cache, block_table, query_start, seq_lens, out,
                scale=scale * cache_scales[0], value_scale=cache_scales[1], num_tokens=num_tokens,
                first_row=first_row, num_rows=num_rows, bounds=bounds, soft_cap=soft_cap,
                sinks=sinks, **reach,
            )  # fmt: skip
        except Exception as error:
            if not hopper.fails_to_compile(error):
                raise
    if uniform:
        config = uniform_config(group, head_dim, query.dtype)
    block_m, block_n, num_warps, num_stages, value_parts = config or prefill_config(
        max_query_len, group, head_dim, query.dtype, bounds is not None, cache.key_words is not None
    )
    num_tiles = num_tokens // (block_m // group) + num_rows
    by_head = (num_tiles, num_kv_heads) if bounds is None else (num_kv_heads, num_tiles)
    launch(_prefill_kernel, (*by_head, value_parts))(
        out,
        query,
        *cache.tensors,
        block_table,
        query_start,
        seq_lens,
        seq_lens if bounds is None else bounds,
        next(part for part in (alibi_slopes, distance_bias, seq_lens) if part is not None),
        seq_lens if sinks is None else sinks,
        scale * cache_scales[0],
        cache_scales[1],
        first_row,
        num_rows,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        *cache.strides,
        block_table.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.block_size,
        **reach_constants(**reach),
        SOFT_CAP=soft_cap or 0.0,
        ALIBI=alibi_slopes is not None,
        DISTANCES=0 if distance_bias is None else distance_bias.shape[1],
        SINKS=sinks is not None,
        MIXED=bounds is not None,
        UNIFORM=uniform,
        NUM_KV_HEADS=num_kv_heads,
        **cache.constants(head_dim),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_width(key_width),
        BLOCK_V=block_width(triton.cdiv(value_width, value_parts)),
        VALUE_PARTS=value_parts,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out
