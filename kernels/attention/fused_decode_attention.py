"""Decode attention straight from the fused projection: norm, rotation, cache write, attention.

One launch per layer instead of three (norm and rotation, attention, join of its splits), which at
small batches cost more than the bytes they move. Each program computes its queries from the
projection. The program with the end of the sequence also computes the new key and value, writes
them to the cache, and attends to them from registers; a single row with several splits has an extra
program for this. The program that finishes a row's last split joins all splits.

Memory and operations as in paged_attention_decode.py, and the projection once for each split.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from .decode_codes import decode_width
from .decode_floats import (
    attend_ahead,
    attend_floats,
    attend_level,
    attend_split,
    float_tile,
    soft_capped,
)
from .decode_splits import (
    MIN_SPLIT_TILES,
    DecodeConfig,
    _first_seen,
    cached_tiles,
    decode_config,
    leveled_tiles,
    prefetch_weights,
    program_tiles,
    store_or_join,
    workspace_elements,
)
from .fused_decode_codes import fused_decode_codes_kernel
from .levels import (
    LevelRows,
    level_arguments,
    level_columns,
    level_constants,
    level_counts,
    level_tiles,
)
from .new_token import cached_new_token
from .projected_heads import norm_weights, normed_rotated_heads, raw_heads, rotation_angles
from .quantized_tiles import (
    FLOATS,
    Quantized,
    block_width,
    cache_arguments,
    is_narrow,
    product_dtype,
    product_query,
)
from .reach import reach_constants

EARLY_WIDTH = 4096
"""Total width of heads from which the next kernel may start early (as in gemv.py): the weight is
then large. With keys ahead it may always."""
MAX_GROUP_WIDTH = 1 << 13
"""Most channels of the query heads that share a key head: registers hold them."""
PRELOAD_BYTES = 1 << 14
"""Most bytes of the shortest split's keys that are loaded before the projection is ready: registers
hold them."""
PRELOAD_BEHIND = 1 << 24
"""Bytes of the projection's weight from which keys are preloaded under grouped queries; smaller
weights gain nothing."""
NEW_TOKEN_PROGRAM_ROWS = 1
"""Most rows whose new token gets a program of its own, if the sequence has several splits. Saves
0.4 to 0.6 us per layer on an H200."""
AHEAD_ROWS = 1
"""Most rows whose programs have their next keys ahead in registers. With little shared memory they
can lie beside the projection's, and load their first keys meanwhile. Two rows are slower so."""
AHEAD_BYTES = 1 << 13
"""Most bytes of keys that a program has ahead."""
AHEAD_PER_SM = 3
"""Programs with keys ahead that a multiprocessor runs at once, by their registers."""
INTERPRETER_PROGRAMS = 64
"""The same for all of Triton's interpreter."""
PREFETCH_BYTES = 8 << 20
"""Bytes of the next weights to prefetch; more delays the products."""
PREFETCH_PROGRAMS = 32
"""Programs that prefetch them, approximately."""
JOIN_SPLITS = 8
"""Most splits joined per iteration."""
AHEAD_JOIN_SPLITS = 32
"""The same with keys ahead. Saves 1 to 2.5 us from 1,024 tokens on."""
JOIN_ELEMENTS = 1 << 14
"""Most channels joined per iteration: registers hold them."""


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


def _prefetched(weights: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    left, prefetched = PREFETCH_BYTES, []
    for weight in weights[:2]:
        num_bytes = min(weight.nbytes, left) // 1024 * 1024
        if num_bytes and weight.data_ptr() % 16 == 0:
            prefetched += [weight, num_bytes]
            left -= num_bytes
    return (*prefetched, *prefetched[:1], 0) if len(prefetched) == 2 else tuple(prefetched)


@functools.cache
def _programs_at_once(device: torch.device) -> int:
    """Return the programs with keys ahead that the device runs at once."""
    if device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return int(AHEAD_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count)


def fits_registers(group: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether one launch can serve `group` query heads that share a key head.

    With float32 heads over 256 channels the kernel spilled 1,344 bytes per thread, and gave wrong
    results on an H200 with 8-bit keys and 4-bit values.
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
    levels: LevelRows | None = None,
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
    next_weights: what is read after this, contiguous, in this order: the first PREFETCH_BYTES of
    two of them are prefetched, if there is one row of few keys. levels: over a contiguous cache of
    floats of qkv's type, if the first blocks of rows have tokens in fewer bits, all of which are
    seen; each block counts as block_size tokens in seq_lens.
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
    programs = num_rows * num_kv_heads
    block_n, num_warps, num_stages = config or decode_config(
        head_dim, qkv.dtype, programs, is_narrow(kv_cache)
    )
    floats = cache.key_bits == FLOATS and levels is None
    min_tiles = MIN_SPLIT_TILES
    tile_bytes = block_n * block_d * qkv.element_size()
    ahead = num_rows <= AHEAD_ROWS and floats and not cache.is_fp8 and tile_bytes <= AHEAD_BYTES
    if ahead:
        # Others would begin when the first ones end.
        num_splits = min(num_splits, max(1, _programs_at_once(qkv.device) // num_kv_heads))
        min_tiles = min(MIN_SPLIT_TILES, AHEAD_BYTES // tile_bytes)
    preload = ahead or (
        floats
        and MIN_SPLIT_TILES * tile_bytes <= PRELOAD_BYTES
        and (group == 1 or width * num_heads * head_dim * qkv.element_size() > PRELOAD_BEHIND)
    )  # fmt: skip
    join_splits = AHEAD_JOIN_SPLITS if ahead else JOIN_SPLITS
    join_splits = min(join_splits, max(1, JOIN_ELEMENTS // (block_g * block_d)))
    constants: dict[str, Any]
    words: tuple[Any, ...]
    factors: tuple[float, ...]
    if cache.key_bits == FLOATS:
        kernel, factors = _fused_decode_kernel, (1.0 / cache_scales[0],)
        words = level_arguments(levels, seq_lens)
        constants = {
            "BLOCK_M": 1 if group == 1 else max(16, block_g),
            "FP8": cache.is_fp8,
            "PRELOAD_KV": preload,
            "AHEAD": ahead,
            "BLOCK_BYTES": 0 if levels is None else cache.keys[0].nbytes,
            **level_constants(() if levels is None else levels.formats),
        }
    else:
        kernel, words, factors = fused_decode_codes_kernel, (cache.key_words, cache.value_words), ()
        constants = {
            **cache.constants(head_dim),
            "BLOCK_M": max(16, block_g),
            "BLOCK_K": decode_width(key_width, cache.key_bits),
            "BLOCK_V": decode_width(value_width, cache.value_bits),
        }
    options = pdl_options(qkv.device)
    prefetched = _prefetched(next_weights) if options and num_rows == 1 else ()
    prefetching = triton.cdiv(PREFETCH_PROGRAMS, num_kv_heads) if prefetched else 0
    launch(kernel, (num_rows, num_kv_heads, num_splits + prefetching))(
        out,
        workspace,
        workspace[num_rows * num_heads * num_splits * head_dim :],
        counters,
        qkv,
        cache.keys,
        cache.values,
        *words,
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
        *factors,
        cache_scales[1],
        num_splits,
        out.stride(0),
        qkv.stride(0),
        0 if cos_sin is None else cos_sin.stride(0),
        *cache.strides,
        block_table.stride(0),
        *(prefetched or (None, 0, None, 0)),
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
        KEEP_QUERIES=query_ring is not None,
        NORM_QUERY=query_norm is not None,
        NORM_KEY=key_norm is not None,
        MIN_TILES=min_tiles,
        BLOCK_G=block_g,
        BLOCK_N=block_n,
        BLOCK_S=min(join_splits, triton.next_power_of_2(num_splits)),
        BLOCK_D=block_d,
        NEW_TOKEN_PROGRAM=num_rows <= NEW_TOKEN_PROGRAM_ROWS and num_splits > 1,
        PREFETCH=bool(prefetched),
        PDL=bool(options),
        EARLY_LAUNCH=ahead or num_heads * head_dim >= EARLY_WIDTH,
        **constants,
        num_warps=num_warps,
        num_stages=num_stages,
        **options,
    )
    return out
