"""Decode attention straight from the fused projection: norm, rotation, cache write, attention.

One launch per layer instead of three (norm and rotation, attention, join of its splits), which
at small batches cost more than the bytes they move. Each program computes its queries from
the projection; the program with the end of the sequence also computes the new key and value, writes
them to the cache, and attends to them from registers; of a single row with several splits another
program does, while these attend. The program that finishes a row's last split joins all splits.

Memory and operations as in paged_attention_decode.py, and the projection once for each split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from ..tiles import ask_l2_for
from .decode_codes import (
    add_code_values,
    add_halves,
    code_scores,
    decode_width,
    load_codes,
    product_starts,
    query_parts,
    whole_halves,
    zero_parts,
)
from .decode_floats import attend_floats, attend_split, float_tile
from .decode_splits import (
    MIN_SPLIT_TILES,
    DecodeConfig,
    _first_seen,
    _join,
    _tiles_between,
    decode_config,
    workspace_elements,
)
from .new_token import cached_new_token
from .projected_heads import norm_weights, raw_heads, turned_heads
from .quantized_tiles import (
    Quantized,
    block_width,
    cache_arguments,
    is_narrow,
    product_dtype,
    product_query,
)
from .reach import reach_constants

EARLY_WIDTH = 4096
"""Total width of the heads from which on the next kernel may start at once, as in gemv.py: the
weight is then large."""
MAX_GROUP_WIDTH = 1 << 13
"""Channels of the query heads that share a key head, at most: registers hold them."""
PRELOAD_BYTES = 1 << 14
"""Keys of the shortest split that are loaded before the projection is there, at most: registers
hold them."""
PRELOAD_BEHIND = 1 << 24
"""Bytes of the projection's weight, if it is as long as all queries, from which on they are, if
query heads share key heads: after a smaller one it was not seen to pay."""
OWN_ROWS = 1
"""Rows up to which a new token has a program of its own, where its sequence has several splits: its
key is made while they attend. Worth 0.4 to 0.6 us of a layer on an H200."""
AHEAD_BYTES = 8 << 20
"""Of the weights that are read next, asked for ahead. More makes the products wait for it."""
AHEAD_PROGRAMS = 32
"""That ask for them, or a few more."""
JOIN_SPLITS = 8
"""Splits that are joined per iteration, at most."""
JOIN_ELEMENTS = 1 << 14
"""Channels of their heads, at most: what registers hold."""


@triton.jit(do_not_specialize=["num_splits", "stride_table"])
def _fused_decode_kernel(
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
    ring_ptr,
    places_ptr,
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
    RING: tl.constexpr,
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
    FP8: tl.constexpr,
    PRELOAD: tl.constexpr,
    OWN: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per (row, kv head, split); with OWN one of them for the new token, if there are
    several; with AHEAD more, which ask for weights. Scores are kept in units of log2."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row64 = row.to(tl.int64)
    if PDL and EARLY:
        gdc_launch_dependents()
    seq_len = tl.load(seq_lens_ptr + row)
    newest = seq_len - 1
    lower = _first_seen(seq_len, WINDOW, CHUNK)
    if OWN:
        first_tile, end, per_split = _tiles_between(
            lower, newest, num_splits - 1, BLOCK_N, MIN_TILES
        )
        end = tl.where(lower < newest, end, first_tile)
    else:
        first_tile, end, per_split = _tiles_between(lower, seq_len, num_splits, BLOCK_N, MIN_TILES)
    if AHEAD:
        if split >= num_splits:
            # Memory is idle where splits are short: while they wait for the projection, each other
            # and the join.
            if per_split == MIN_TILES:
                gdc_wait()
                number = (split - num_splits) * NUM_KV_HEADS + kv_head
                count = (tl.num_programs(2) - num_splits) * NUM_KV_HEADS
                ask_l2_for(first_weight_ptr, first_bytes, number, count)
                ask_l2_for(second_weight_ptr, second_bytes, number, count)
            return
    active = tl.cdiv(end - first_tile, per_split)
    joined = active
    if OWN:
        # The first program has the new token alone, unless there is one split, or none.
        joined = tl.where(active > 1, active + 1, 1)
        split -= 1
        attends_new = (split < 0) == (active > 1)
        begin_tile = tl.where(split < 0, end, first_tile + split * per_split)
        if (split < 0) & (active <= 1) | (split > 0) & (begin_tile >= end):
            return
        if (split == 0) & (seq_len <= 0):
            return
        attends_new = attends_new & (split <= 0)
    else:
        begin_tile = first_tile + split * per_split
        if begin_tile >= end:
            return
        attends_new = begin_tile + per_split >= end
    end_tile = tl.minimum(begin_tile + per_split, end)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    # Keys of 4 bits are in two halves, each with the same angles.
    dim = tl.arange(0, BLOCK_K)
    in_head = dim < KEY_WIDTH
    dim_v = tl.arange(0, BLOCK_V)
    in_value = dim_v < VALUE_WIDTH
    mask_q = (offs_m < GROUP)[:, None] & in_head[None, :]
    dtype = qkv_ptr.dtype.element_ty
    cos = tl.zeros([BLOCK_K], tl.float32)
    sin = tl.zeros([BLOCK_K], tl.float32)
    if ROTARY_DIM:
        TURN: tl.constexpr = ROTARY_DIM // 2
        turn = newest.to(tl.int64)
        if POSITIONS:
            turn = tl.load(positions_ptr + row)
        angles = cos_sin_ptr + turn * stride_cos_sin + dim % TURN
        turns = in_head & (dim < ROTARY_DIM)
        cos = tl.load(angles, mask=turns, other=1.0)
        sin = tl.load(angles + TURN, mask=turns, other=0.0)
        if KEY_BITS != 4:
            sin = tl.where(dim < TURN, -sin, sin)
    table = block_table_ptr + row64 * stride_table
    if PRELOAD:
        # What earlier steps have cached is there before the projection is: the keys and values of
        # a split that is as short as splits get.
        is_short = (per_split == MIN_TILES) & (begin_tile < end)
        early_position = begin_tile * BLOCK_N + tl.arange(0, BLOCK_N * MIN_TILES)
        early_key, early_value, early_valid = float_tile(
            early_position, lower, tl.where(is_short, newest, 0), key_cache_ptr, value_cache_ptr,
            table, kv_head, dim, in_head, stride_block, stride_slot, stride_head, BLOCK_SIZE,
        )  # fmt: skip
    HALVES: tl.constexpr = KEY_BITS == 4
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
    query, query_high = turned_heads(
        query_x, query_y, query_weight, query_weight_too, query_eps, cos, sin, NORM_QUERY, HALVES,
        ROTARY_DIM, NORM_LAST, HEAD_DIM,
    )  # fmt: skip
    query_high = query_high.to(dtype)
    query = query.to(dtype)
    if RING:
        if split == 0:
            place = tl.load(places_ptr + row) * (NUM_HEADS * HEAD_DIM)
            kept_query = ring_ptr + place + head[:, None] * HEAD_DIM + dim[None, :]
            tl.store(kept_query, query, mask=mask_q)
            if KEY_BITS == 4:
                tl.store(kept_query + HALF, query_high, mask=mask_q)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if VALUE_BITS == 16:
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        acc_high = acc
    else:
        parts = zero_parts(BLOCK_M, BLOCK_V // 2, VALUE_BITS)
        missing = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if attends_new:
        # The new token is written to the cache, and attended to from registers.
        raw_key, raw_key_high = turned_heads(
            key_x, key_y, key_weight, key_weight_too, key_eps, cos, sin, NORM_KEY, HALVES,
            ROTARY_DIM, NORM_LAST, HEAD_DIM,
        )  # fmt: skip
        mask_new = in_head[None, :]
        new_key, key_high, new_value, value_high = cached_new_token(
            raw_key.to(dtype), raw_key_high.to(dtype), raw_value, raw_value_high,
            tl.load(slot_ptr + row).to(tl.int64), kv_head, key_cache_ptr, value_cache_ptr,
            key_words_ptr, value_words_ptr, key_factor, value_scale, dim, mask_new, dim_v,
            in_value[None, :], stride_block, stride_slot, stride_head, NUM_KV_HEADS, BLOCK_SIZE,
            KEY_BITS, VALUE_BITS, FP8,
        )  # fmt: skip
        m = tl.sum(query.to(tl.float32) * tl.where(mask_new, new_key.to(tl.float32), 0.0), axis=1)
        if KEY_BITS == 4:
            m += tl.sum(query_high.to(tl.float32) * tl.where(mask_new, key_high, 0.0), axis=1)
        m *= scale
        if SOFT_CAP > 0.0:
            m = SOFT_CAP * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * m / SOFT_CAP)))
        m *= LOG2E
        total += 1.0
        if VALUE_BITS == 16:
            acc += new_value.to(tl.float32)
        else:
            parts = add_halves(parts, new_value, value_high, VALUE_BITS)

    kind: tl.constexpr = product_dtype(key_cache_ptr.dtype.element_ty, dtype)
    query = product_query(query, kind)
    # Scores of codes are in units of log2 from the start, if nothing is added to them.
    LOGS: tl.constexpr = KEY_BITS < 16 and SOFT_CAP == 0.0 and not ALIBI
    if KEY_BITS < 16:
        query = query_parts(query, product_query(query_high, kind), KEY_BITS)
        factor = scale * LOG2E if LOGS else scale
        low, high, query_sum = product_starts(query, KEY_BITS)
        query_sum *= factor
        totals = tl.where(offs_n[None, :] == 0, total[:, None], 0.0)
    if not ALIBI:
        slope = 0.0
    if PRELOAD:
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
    elif KEY_BITS == 16:
        acc, m, total = attend_split(
            acc, m, total, query, begin_tile, end_tile, lower, newest, key_cache_ptr,
            value_cache_ptr, table, kv_head, dim, in_head, slope, scale, stride_block, stride_slot,
            stride_head, BLOCK_SIZE, SOFT_CAP, ALIBI, BLOCK_N,
        )  # fmt: skip
    else:
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
            if SOFT_CAP > 0.0:
                scores = SOFT_CAP * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / SOFT_CAP)))
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

    if PDL and not EARLY:
        gdc_launch_dependents()
    if VALUE_BITS < 16:
        acc, acc_high = whole_halves(parts, VALUE_BITS)
        total = tl.sum(totals, axis=1)
        rest = tl.sum(missing, axis=1)[:, None]
        acc += rest
        acc_high += rest
    factor = (value_scale / total)[:, None]
    acc = acc * factor
    mask_out = (offs_m < GROUP)[:, None] & in_value[None, :]
    if joined == 1:
        target = out_ptr + row64 * stride_out + head[:, None] * HEAD_DIM + dim_v[None, :]
        tl.store(target, acc.to(dtype), mask=mask_out)
        if VALUE_BITS == 4:
            tl.store(target + HALF, (acc_high * factor).to(dtype), mask=mask_out)
        return
    if OWN:
        split = tl.where(split < 0, active, split)
    at = (row64 * NUM_HEADS + head) * num_splits + split
    tl.store(lse_ptr + at, m + tl.log2(total), mask=offs_m < GROUP)
    partial = partial_ptr + at[:, None] * HEAD_DIM + dim_v[None, :]
    tl.store(partial, acc, mask=mask_out)
    if VALUE_BITS == 4:
        tl.store(partial + HALF, acc_high * factor, mask=mask_out)
    tl.debug_barrier()
    counter = counter_ptr + row * NUM_KV_HEADS + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") != joined - 1:
        return
    tl.store(counter, 0)
    _join(
        out_ptr + row64 * stride_out,
        partial_ptr,
        lse_ptr,
        row64,
        kv_head,
        joined,
        num_splits,
        NUM_HEADS,
        GROUP,
        HEAD_DIM,
        BLOCK_G,
        BLOCK_S,
        BLOCK_D,
        dtype,
    )


def _asked(weights: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return two weights and how many of their bytes are asked for; () for none."""
    left, asked = AHEAD_BYTES, []
    for weight in weights[:2]:
        num_bytes = min(weight.nbytes, left) // 1024 * 1024
        if num_bytes and weight.data_ptr() % 16 == 0:
            asked += [weight, num_bytes]
            left -= num_bytes
    return (*asked, *asked[:1], 0) if len(asked) == 2 else tuple(asked)


def fits_registers(group: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether one launch can serve `group` query heads that share a key head.

    Of float32 heads over 256 channels the compiled kernel spilled 1,344 bytes of a thread, and on
    an H200 gave wrong results over a cache with keys of 8 and values of 4 bits.
    """
    if head_dim > 256 and dtype == torch.float32:
        return False
    widths = triton.next_power_of_2(group) * triton.next_power_of_2(head_dim)
    return bool(widths <= MAX_GROUP_WIDTH)


def fused_decode_attention(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    kv_cache: torch.Tensor | Quantized,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale: float,
    counters: torch.Tensor,
    workspace: torch.Tensor,
    num_splits: int = 1,
    cos_sin: torch.Tensor | None = None,
    query_norm: tuple[torch.Tensor, float] | None = None,
    key_norm: tuple[torch.Tensor, float] | None = None,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    chunk_lookback: int = 0,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
    cache_scales: tuple[float, float] = (1.0, 1.0),
    positions: torch.Tensor | None = None,
    query_ring: tuple[torch.Tensor, torch.Tensor] | None = None,
    norm_last: bool = False,
    next_weights: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """qkv: [num_rows, (num_heads + 2 * num_kv_heads) * head_dim], one new token per row, not
    changed → [num_rows, num_heads, head_dim]

    kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim] of qkv's type, or fp8 that is
    multiplied by `cache_scales` (keys, values), last stride 1, or quantized: the new key and value
    are written to slot_mapping [num_rows] int64. block_table: [num_rows, max_blocks] int32;
    seq_lens: [num_rows] int32, at least 1, including the new token. positions: [num_rows] int64 of
    the new tokens; None: each is that of the last token in the cache. query_ring: where queries
    are written, normed and rotated: [places, num_heads, head_dim], contiguous, of qkv's type, and
    the place of each row, [num_rows] int64. cos_sin: [max_positions, rotary_dim] float32: as many
    channels of a head are rotated, all of them where keys have 4 bits; norms: (weight [head_dim],
    eps), after the rotation with `norm_last`; alibi_slopes: as `paged_attention_decode` has them.
    next_weights: what is read after this, contiguous, in this order: the L2 cache is asked for the
    first AHEAD_BYTES of two of them, if there is one row of few keys.
    counters: [at least num_rows * num_kv_heads] int32, zeros before and after; workspace: float32,
    `workspace_elements(...)`.
    No host synchronisation; safe to capture.
    """
    num_rows, width = qkv.shape
    head_dim = width // (num_heads + 2 * num_kv_heads)
    out = torch.empty((num_rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return out
    rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
    cache = cache_arguments(kv_cache)
    if rotary_dim > head_dim or (rotary_dim not in (0, head_dim) and cache.key_bits == 4):
        raise ValueError(f"cos_sin rotates {rotary_dim} channels; a head has {head_dim}")
    if not fits_registers(num_heads // num_kv_heads, head_dim, qkv.dtype):
        raise ValueError(
            f"{num_heads // num_kv_heads} heads of {head_dim} channels of {qkv.dtype} share a key "
            "head: registers do not hold them; the separate kernels serve them"
        )
    needed = workspace_elements(num_rows, num_heads, head_dim, num_splits)
    if workspace.numel() < needed:
        raise ValueError(f"workspace has {workspace.numel()} elements, not {needed}")
    group = num_heads // num_kv_heads
    key_width, value_width = cache.key_width(head_dim), cache.value_width(head_dim)
    block_g, block_d = triton.next_power_of_2(group), block_width(head_dim)
    join_splits = min(JOIN_SPLITS, max(1, JOIN_ELEMENTS // (block_g * block_d)))
    programs = num_rows * num_kv_heads
    block_n, num_warps, num_stages = config or decode_config(
        head_dim, qkv.dtype, programs, is_narrow(kv_cache)
    )
    item, block_k = qkv.element_size(), decode_width(key_width, cache.key_bits)
    preload = (
        cache.key_bits == 16
        and block_n * MIN_SPLIT_TILES * block_k * item <= PRELOAD_BYTES
        and (group == 1 or width * num_heads * head_dim * item > PRELOAD_BEHIND)
    )
    options = pdl_options(qkv.device)
    ahead = _asked(next_weights) if options and num_rows == 1 else ()
    asking = triton.cdiv(AHEAD_PROGRAMS, num_kv_heads) if ahead else 0
    launch(_fused_decode_kernel, (num_rows, num_kv_heads, num_splits + asking))(
        out,
        workspace,
        workspace[num_rows * num_heads * num_splits * head_dim :],
        counters,
        qkv,
        cache.keys,
        cache.values,
        cache.key_words,
        cache.value_words,
        block_table,
        seq_lens,
        slot_mapping,
        positions,
        None if query_ring is None else query_ring[0],
        None if query_ring is None else query_ring[1],
        cos_sin,
        alibi_slopes,
        None if query_norm is None else query_norm[0],
        None if key_norm is None else key_norm[0],
        0.0 if query_norm is None else query_norm[1],
        0.0 if key_norm is None else key_norm[1],
        scale * cache_scales[0],
        1.0 / cache_scales[0],
        cache_scales[1],
        num_splits,
        out.stride(0),
        qkv.stride(0),
        0 if cos_sin is None else cos_sin.stride(0),
        *cache.strides,
        block_table.stride(0),
        *(ahead or (None, 0, None, 0)),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.block_size,
        **reach_constants(sliding_window, attention_chunk_size, chunk_lookback),
        SOFT_CAP=soft_cap or 0.0,
        ALIBI=alibi_slopes is not None,
        ROTARY_DIM=rotary_dim,
        NORM_LAST=norm_last,
        POSITIONS=positions is not None,
        RING=query_ring is not None,
        NORM_QUERY=query_norm is not None,
        NORM_KEY=key_norm is not None,
        MIN_TILES=MIN_SPLIT_TILES,
        KEY_BITS=cache.key_bits,
        VALUE_BITS=cache.value_bits,
        KEY_WIDTH=key_width,
        VALUE_WIDTH=value_width,
        BLOCK_M=1 if group == 1 and cache.key_bits == 16 else max(16, block_g),
        BLOCK_G=block_g,
        BLOCK_N=block_n,
        BLOCK_S=min(join_splits, triton.next_power_of_2(num_splits)),
        BLOCK_K=block_k,
        BLOCK_V=decode_width(value_width, cache.value_bits),
        BLOCK_D=block_d,
        FP8=cache.is_fp8,
        PRELOAD=preload,
        OWN=num_rows <= OWN_ROWS and num_splits > 1,
        AHEAD=bool(ahead),
        PDL=bool(options),
        EARLY=num_heads * head_dim >= EARLY_WIDTH,
        num_warps=num_warps,
        num_stages=num_stages,
        **options,
    )
    return out
