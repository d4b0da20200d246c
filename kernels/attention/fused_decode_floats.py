"""Fused decode attention over a cache of floats, the first blocks of which may have tokens in fewer
bits.

Each program computes its queries from the projection. The program with the end of the sequence also
computes the new key and value, writes them to the cache, and attends to them from registers; a
single row with several splits has an extra program for this. The program that finishes a row's last
split joins all splits.

Memory and operations as in paged_attention_decode.py, and the projection once for each split.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..pdl import gdc_launch_dependents, gdc_wait
from .decode_floats import (
    attend_ahead,
    attend_floats,
    attend_level,
    attend_split,
    float_tile,
    soft_capped,
)
from .decode_splits import (
    _first_seen,
    cached_tiles,
    leveled_tiles,
    prefetch_weights,
    program_tiles,
    store_or_join,
)
from .levels import level_columns, level_counts, level_tiles
from .new_token import cached_new_token
from .projected_heads import norm_weights, normed_rotated_heads, raw_heads, rotation_angles
from .quantized_tiles import product_dtype, product_query


@triton.jit(
    do_not_specialize=["num_splits", "stride_table"],
    do_not_specialize_on_alignment=["levels_ptr", "slots_ptr"],
)
def _fused_decode_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    counter_ptr,
    qkv_ptr,
    key_cache_ptr,
    value_cache_ptr,
    levels_ptr,
    slots_ptr,
    block_table_ptr,
    seq_lens_ptr,
    slot_ptr,
    positions_ptr,
    kept_queries_ptr,
    kept_places_ptr,
    cos_sin_ptr,
    slopes_ptr,
    query_weight_ptr,
    key_weight_ptr,
    query_eps,
    key_eps,
    scale,
    key_factor,
    value_scale,
    num_splits,
    stride_out,
    stride_qkv,
    stride_cos_sin,
    stride_block,
    stride_slot,
    stride_head,
    stride_table,
    first_weight_ptr,
    first_bytes,
    second_weight_ptr,
    second_bytes,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM_LAST: tl.constexpr,
    POSITIONS: tl.constexpr,
    KEEP_QUERIES: tl.constexpr,
    NORM_QUERY: tl.constexpr,
    NORM_KEY: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FP8: tl.constexpr,
    LEVELS: tl.constexpr,
    BITS_1: tl.constexpr,
    TOKENS_1: tl.constexpr,
    BITS_2: tl.constexpr,
    TOKENS_2: tl.constexpr,
    BITS_3: tl.constexpr,
    TOKENS_3: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    PRELOAD_KV: tl.constexpr,
    AHEAD: tl.constexpr,
    NEW_TOKEN_PROGRAM: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    EARLY_LAUNCH: tl.constexpr,
):
    """One program per (row, kv head, split), plus one for the new token with NEW_TOKEN_PROGRAM, and
    more with PREFETCH. Scores are in units of log2.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row64 = row.to(tl.int64)
    if PDL and EARLY_LAUNCH:
        gdc_launch_dependents()
    seq_len = tl.load(seq_lens_ptr + row)
    newest = seq_len - 1
    if LEVELS > 0:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        count_1, count_2, count_3 = level_counts(levels_ptr, slot, LEVELS)
        column_2, column_3, column = level_columns(
            count_1, count_2, count_3, TOKENS_1, TOKENS_2, TOKENS_3
        )
        end_1, end_2, end_3 = level_tiles(count_1, count_2, count_3, BLOCK_N)
        # The newest tokens begin at a block; their places are those of the cache.
        lower = column * BLOCK_SIZE
        first_tile, end, per_split = leveled_tiles(
            end_3, lower, seq_len, num_splits, BLOCK_N, MIN_TILES, NEW_TOKEN_PROGRAM
        )
    else:
        lower = _first_seen(seq_len, WINDOW, CHUNK)
        first_tile, end, per_split = cached_tiles(
            lower, seq_len, num_splits, BLOCK_N, MIN_TILES, NEW_TOKEN_PROGRAM
        )
    if PREFETCH:
        if split >= num_splits:
            prefetch_weights(
                first_weight_ptr, first_bytes, second_weight_ptr, second_bytes, split - num_splits,
                tl.num_programs(2) - num_splits, kv_head, per_split == MIN_TILES, NUM_KV_HEADS,
            )  # fmt: skip
            return
    split, begin_tile, end_tile, active, attends_new, idle = program_tiles(
        split, first_tile, end, per_split, seq_len, NEW_TOKEN_PROGRAM
    )
    if idle:
        return

    offs_m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    mask_q = (offs_m < GROUP)[:, None] & in_head[None, :]
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    cos, sin = rotation_angles(
        cos_sin_ptr, positions_ptr, row, newest, stride_cos_sin, dim, in_head, False, ROTARY_DIM,
        POSITIONS,
    )  # fmt: skip
    table = block_table_ptr + row64 * stride_table
    new_slot = tl.load(slot_ptr + row).to(tl.int64)
    if PRELOAD_KV:
        # What earlier steps have cached is there before the projection is: the keys and values of
        # a split that is as short as splits get, or with AHEAD the first ones of any.
        is_short = (per_split == MIN_TILES) & (begin_tile < end)
        early_end = tl.where(is_short, newest, 0)
        if AHEAD:
            early_end = tl.minimum(newest, end_tile * BLOCK_N)
        early_position = begin_tile * BLOCK_N + tl.arange(0, BLOCK_N * MIN_TILES)
        early_key, early_value, early_valid = float_tile(
            early_position, lower, early_end, key_cache_ptr, value_cache_ptr, table, kv_head, dim,
            in_head, stride_block, stride_slot, stride_head, BLOCK_SIZE,
        )  # fmt: skip
    query_weight, query_weight_too = norm_weights(
        query_weight_ptr, dim, in_head, NORM_QUERY, False, ROTARY_DIM, HEAD_DIM
    )
    key_weight, key_weight_too = norm_weights(
        key_weight_ptr, dim, in_head, NORM_KEY, False, ROTARY_DIM, HEAD_DIM
    )
    if PDL:
        gdc_wait()

    head = kv_head * GROUP + offs_m
    projected = qkv_ptr + row64 * stride_qkv
    query_x, query_y = raw_heads(
        projected + head[:, None] * HEAD_DIM, dim, mask_q, False, ROTARY_DIM, HEAD_DIM
    )
    new = projected + (NUM_HEADS + kv_head) * HEAD_DIM + tl.zeros([1, 1], tl.int32)
    mask_read = in_head[None, :] & attends_new
    key_x, key_y = raw_heads(new, dim, mask_read, False, ROTARY_DIM, HEAD_DIM)
    new += NUM_KV_HEADS * HEAD_DIM
    raw_value = tl.load(new + dim[None, :], mask=mask_read, other=0.0)
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=offs_m < GROUP, other=0.0)
    query, _query_high = normed_rotated_heads(
        query_x, query_y, query_weight, query_weight_too, query_eps, cos, sin, NORM_QUERY, False,
        ROTARY_DIM, NORM_LAST, HEAD_DIM,
    )  # fmt: skip
    query = query.to(dtype)
    if KEEP_QUERIES:
        if split == 0:
            place = tl.load(kept_places_ptr + row) * (NUM_HEADS * HEAD_DIM)
            kept_query = kept_queries_ptr + place + head[:, None] * HEAD_DIM + dim[None, :]
            tl.store(kept_query, query, mask=mask_q)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if attends_new:
        # The new token is written to the cache, and attended to from registers.
        raw_key, _key_high = normed_rotated_heads(
            key_x, key_y, key_weight, key_weight_too, key_eps, cos, sin, NORM_KEY, False,
            ROTARY_DIM, NORM_LAST, HEAD_DIM,
        )  # fmt: skip
        mask_new = in_head[None, :]
        new_key, new_value = cached_new_token(
            raw_key.to(dtype), raw_value, new_slot, kv_head, key_cache_ptr, value_cache_ptr,
            key_factor, value_scale, dim, mask_new, stride_block, stride_slot, stride_head,
            BLOCK_SIZE, FP8,
        )  # fmt: skip
        m = tl.sum(query.to(tl.float32) * tl.where(mask_new, new_key.to(tl.float32), 0.0), axis=1)
        m = soft_capped(m * scale, SOFT_CAP) * LOG2E
        total += 1.0
        acc += new_value.to(tl.float32)

    query = product_query(query, product_dtype(key_cache_ptr.dtype.element_ty, dtype))
    if LEVELS > 0:
        acc, m, total = attend_level(
            acc, m, total, query, begin_tile, tl.minimum(end_tile, end_1), count_1, key_cache_ptr,
            value_cache_ptr, table, kv_head, slope, scale, BITS_1, TOKENS_1, NUM_KV_HEADS, HEAD_DIM,
            BLOCK_BYTES, SOFT_CAP, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        if LEVELS > 1:
            acc, m, total = attend_level(
                acc, m, total, query, tl.maximum(begin_tile - end_1, 0),
                tl.minimum(end_tile, end_2) - end_1, count_2, key_cache_ptr, value_cache_ptr,
                table + column_2, kv_head, slope, scale, BITS_2, TOKENS_2, NUM_KV_HEADS, HEAD_DIM,
                BLOCK_BYTES, SOFT_CAP, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        if LEVELS > 2:
            acc, m, total = attend_level(
                acc, m, total, query, tl.maximum(begin_tile - end_2, 0),
                tl.minimum(end_tile, end_3) - end_2, count_3, key_cache_ptr, value_cache_ptr,
                table + column_3, kv_head, slope, scale, BITS_3, TOKENS_3, NUM_KV_HEADS, HEAD_DIM,
                BLOCK_BYTES, SOFT_CAP, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        whole = lower // BLOCK_N
        begin_tile = tl.maximum(begin_tile - end_3, 0) + whole
        end_tile = end_tile - end_3 + whole
    if AHEAD:
        acc, m, total = attend_ahead(
            acc, m, total, query, early_key, early_value, early_valid, begin_tile, end_tile, lower,
            newest, key_cache_ptr, value_cache_ptr, table, kv_head, dim, in_head, slope, scale,
            stride_block, stride_slot, stride_head, BLOCK_SIZE, SOFT_CAP, ALIBI, BLOCK_N, MIN_TILES,
        )  # fmt: skip
    elif PRELOAD_KV:
        if is_short:
            acc, m, total = attend_floats(
                acc, m, total, query, early_key, early_value, early_valid, early_position - newest,
                slope, scale, SOFT_CAP, ALIBI,
            )  # fmt: skip
        else:
            acc, m, total = attend_split(
                acc, m, total, query, begin_tile, end_tile, lower, newest, key_cache_ptr,
                value_cache_ptr, table, kv_head, dim, in_head, slope, scale, stride_block,
                stride_slot, stride_head, BLOCK_SIZE, SOFT_CAP, ALIBI, BLOCK_N,
            )  # fmt: skip
    else:
        acc, m, total = attend_split(
            acc, m, total, query, begin_tile, end_tile, lower, newest, key_cache_ptr,
            value_cache_ptr, table, kv_head, dim, in_head, slope, scale, stride_block, stride_slot,
            stride_head, BLOCK_SIZE, SOFT_CAP, ALIBI, BLOCK_N,
        )  # fmt: skip

    if PDL and not EARLY_LAUNCH:
        gdc_launch_dependents()
    store_or_join(
        out_ptr, partial_ptr, lse_ptr, counter_ptr, acc, acc, m, total, value_scale, row, kv_head,
        split, active, num_splits, stride_out, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM, False,
        NEW_TOKEN_PROGRAM, BLOCK_G, BLOCK_S, BLOCK_D,
    )  # fmt: skip
