"""Decode attention straight from the fused projection: norm, rotation, cache write, attention.

One launch per layer instead of three (norm and rotation, attention, join of its splits), which at
small batches cost more than the bytes they move. Over a cache of floats the kernel is in
fused_decode_floats.py, over one of codes in fused_decode_codes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from ..launch import launch
from ..pdl import pdl_options
from .decode_codes import decode_width
from .decode_splits import DecodeConfig, decode_config, workspace_elements
from .fused_decode_codes import fused_decode_codes_kernel
from .fused_decode_config import (
    PREFETCH_PROGRAMS,
    fits_registers,
    fused_decode_config,
    prefetched_weights,
)
from .fused_decode_floats import _fused_decode_kernel
from .levels import LevelRows, level_arguments, level_constants
from .quantized_tiles import FLOATS, Quantized, block_width, cache_arguments, is_narrow
from .reach import reach_constants


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
    choice = fused_decode_config(
        qkv, num_heads, num_kv_heads, cache, block_n, num_splits, leveled=levels is not None
    )
    num_splits = choice.num_splits
    constants: dict[str, Any]
    words: tuple[Any, ...]
    factors: tuple[float, ...]
    if cache.key_bits == FLOATS:
        kernel, factors = _fused_decode_kernel, (1.0 / cache_scales[0],)
        words = level_arguments(levels, seq_lens)
        constants = {
            "BLOCK_M": 1 if group == 1 else max(16, block_g),
            "FP8": cache.is_fp8,
            "PRELOAD_KV": choice.preload,
            "AHEAD": choice.ahead,
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
    prefetched = prefetched_weights(next_weights) if options and num_rows == 1 else ()
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
        MIN_TILES=choice.min_tiles,
        BLOCK_G=block_g,
        BLOCK_N=block_n,
        BLOCK_S=choice.join_splits,
        BLOCK_D=block_d,
        NEW_TOKEN_PROGRAM=choice.new_token_program,
        PREFETCH=bool(prefetched),
        PDL=bool(options),
        EARLY_LAUNCH=choice.early_launch,
        **constants,
        num_warps=num_warps,
        num_stages=num_stages,
        **options,
    )
    return out
