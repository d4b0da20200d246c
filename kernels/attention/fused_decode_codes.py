"""Fused decode attention over a cache of 8 or 4-bit codes.

A split's keys are not preloaded: their bytes are few, and the dequantised codes need the registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..pdl import gdc_launch_dependents, gdc_wait
from .decode_codes import (
    add_code_values,
    add_halves,
    code_scores,
    load_codes,
    product_starts,
    query_parts,
    whole_halves,
    zero_parts,
)
from .decode_floats import soft_capped
from .decode_splits import (
    _first_seen,
    cached_tiles,
    prefetch_weights,
    program_tiles,
    store_or_join,
)
from .new_token import quantized_new_token
from .projected_heads import norm_weights, normed_rotated_heads, raw_heads, rotation_angles
from .quantized_tiles import product_dtype, product_query


@triton.jit(do_not_specialize=["num_splits", "stride_table"])
def fused_decode_codes_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    counter_ptr,
    qkv_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_words_ptr,
    value_words_ptr,
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
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NEW_TOKEN_PROGRAM: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    EARLY_LAUNCH: tl.constexpr,
):
    """As `_fused_decode_kernel`, over a cache of codes. KEY_WIDTH, VALUE_WIDTH: bytes of a head."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    # Keys of 4 bits are in two halves, each with the same angles.
    HALVES: tl.constexpr = KEY_BITS == 4
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row64 = row.to(tl.int64)
    if PDL and EARLY_LAUNCH:
        gdc_launch_dependents()
    seq_len = tl.load(seq_lens_ptr + row)
    newest = seq_len - 1
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
    offs_n = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_K)
    in_head = dim < KEY_WIDTH
    dim_v = tl.arange(0, BLOCK_V)
    in_value = dim_v < VALUE_WIDTH
    mask_q = (offs_m < GROUP)[:, None] & in_head[None, :]
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    cos, sin = rotation_angles(
        cos_sin_ptr, positions_ptr, row, newest, stride_cos_sin, dim, in_head, HALVES, ROTARY_DIM,
        POSITIONS,
    )  # fmt: skip
    table = block_table_ptr + row64 * stride_table
    query_weight, query_weight_too = norm_weights(
        query_weight_ptr, dim, in_head, NORM_QUERY, HALVES, ROTARY_DIM, HEAD_DIM
    )
    key_weight, key_weight_too = norm_weights(
        key_weight_ptr, dim, in_head, NORM_KEY, HALVES, ROTARY_DIM, HEAD_DIM
    )
    if PDL:
        gdc_wait()

    head = kv_head * GROUP + offs_m
    projected = qkv_ptr + row64 * stride_qkv
    query_x, query_y = raw_heads(
        projected + head[:, None] * HEAD_DIM, dim, mask_q, HALVES, ROTARY_DIM, HEAD_DIM
    )
    new = projected + (NUM_HEADS + kv_head) * HEAD_DIM + tl.zeros([1, 1], tl.int32)
    key_x, key_y = raw_heads(new, dim, in_head[None, :] & attends_new, HALVES, ROTARY_DIM, HEAD_DIM)
    mask_value = in_value[None, :] & attends_new
    new += NUM_KV_HEADS * HEAD_DIM
    raw_value = tl.load(new + dim_v[None, :], mask=mask_value, other=0.0)
    raw_value_high = raw_value
    if VALUE_BITS == 4:
        raw_value_high = tl.load(new + HALF + dim_v[None, :], mask=mask_value, other=0.0)
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=offs_m < GROUP, other=0.0)
    query, query_high = normed_rotated_heads(
        query_x, query_y, query_weight, query_weight_too, query_eps, cos, sin, NORM_QUERY, HALVES,
        ROTARY_DIM, NORM_LAST, HEAD_DIM,
    )  # fmt: skip
    query_high = query_high.to(dtype)
    query = query.to(dtype)
    if KEEP_QUERIES:
        if split == 0:
            place = tl.load(kept_places_ptr + row) * (NUM_HEADS * HEAD_DIM)
            kept_query = kept_queries_ptr + place + head[:, None] * HEAD_DIM + dim[None, :]
            tl.store(kept_query, query, mask=mask_q)
            if HALVES:
                tl.store(kept_query + HALF, query_high, mask=mask_q)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    parts = zero_parts(BLOCK_M, BLOCK_V // 2, VALUE_BITS)
    missing = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if attends_new:
        # The new token is written to the cache, and attended to from registers.
        raw_key, raw_key_high = normed_rotated_heads(
            key_x, key_y, key_weight, key_weight_too, key_eps, cos, sin, NORM_KEY, HALVES,
            ROTARY_DIM, NORM_LAST, HEAD_DIM,
        )  # fmt: skip
        mask_new = in_head[None, :]
        new_key, key_high, new_value, value_high = quantized_new_token(
            raw_key.to(dtype), raw_key_high.to(dtype), raw_value, raw_value_high,
            tl.load(slot_ptr + row).to(tl.int64), kv_head, key_cache_ptr, value_cache_ptr,
            key_words_ptr, value_words_ptr, dim, mask_new, dim_v, in_value[None, :], stride_block,
            stride_slot, stride_head, NUM_KV_HEADS, BLOCK_SIZE, KEY_BITS, VALUE_BITS,
        )  # fmt: skip
        m = tl.sum(query.to(tl.float32) * tl.where(mask_new, new_key.to(tl.float32), 0.0), axis=1)
        if HALVES:
            m += tl.sum(query_high.to(tl.float32) * tl.where(mask_new, key_high, 0.0), axis=1)
        m = soft_capped(m * scale, SOFT_CAP) * LOG2E
        total += 1.0
        parts = add_halves(parts, new_value, value_high, VALUE_BITS)

    kind: tl.constexpr = product_dtype(key_cache_ptr.dtype.element_ty, dtype)
    query = product_query(query, kind)
    query = query_parts(query, product_query(query_high, kind), KEY_BITS)
    # Scores are in units of log2 from the start, if nothing is added to them.
    LOGS: tl.constexpr = SOFT_CAP == 0.0 and not ALIBI
    factor = scale * LOG2E if LOGS else scale
    low, high, query_sum = product_starts(query, KEY_BITS)
    query_sum *= factor
    totals = tl.where(offs_n[None, :] == 0, total[:, None], 0.0)
    for tile in range(begin_tile, end_tile):
        position = tile * BLOCK_N + offs_n
        valid = position < newest
        if WINDOW > 0:
            valid = valid & (position >= lower)
        codes, value_codes, key_words, value_words = load_codes(
            key_cache_ptr, value_cache_ptr, key_words_ptr, value_words_ptr, table, tile, offs_n,
            valid, lower, newest, kv_head, NUM_KV_HEADS, BLOCK_SIZE, WINDOW, KEY_WIDTH,
            VALUE_WIDTH, BLOCK_N, BLOCK_K // 2, BLOCK_V // 2,
        )  # fmt: skip
        scores = code_scores(query, low, high, query_sum, codes, key_words, factor, KEY_BITS)
        scores = soft_capped(scores, SOFT_CAP)
        if ALIBI:
            scores += slope[:, None] * (position - newest)[None, :]
        LOG: tl.constexpr = 1.0 if LOGS else LOG2E
        scores = tl.where(valid[None, :], scores * LOG, -float("inf"))
        # m_new is finite: the newest token is in m, or the tile holds a visible position.
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        weights = tl.exp2(scores - m_new[:, None])
        decay = tl.exp2(m - m_new)
        parts, more = add_code_values(
            parts, decay, weights, value_codes, value_words, dtype, VALUE_BITS
        )
        # Summed over the columns once, after the last tile.
        totals = totals * decay[:, None] + weights
        missing = missing * decay[:, None] + more
        m = m_new

    if PDL and not EARLY_LAUNCH:
        gdc_launch_dependents()
    acc, acc_high = whole_halves(parts, VALUE_BITS)
    total = tl.sum(totals, axis=1)
    rest = tl.sum(missing, axis=1)[:, None]
    acc += rest
    acc_high += rest
    store_or_join(
        out_ptr, partial_ptr, lse_ptr, counter_ptr, acc, acc_high, m, total, value_scale, row,
        kv_head, split, active, num_splits, stride_out, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM,
        VALUE_WIDTH, VALUE_BITS == 4, NEW_TOKEN_PROGRAM, BLOCK_G, BLOCK_S, BLOCK_D,
    )  # fmt: skip
