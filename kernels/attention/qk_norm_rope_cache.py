"""Norm and rotation of a fused projection's heads, and storage of keys and values in the cache.

One launch instead of a norm of queries, one of keys, a rotation and a cache write. Memory: reads
num_tokens * (num_heads + 2 * num_kv_heads) * head_dim elements once and writes them once, queries
and keys in place, and keys and values into the cache: the bound, or the launch at one token.

Source: RoFormer (arXiv 2104.09864), halves paired as in GPT-NeoX.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_wait, pdl_options
from .quantized_tiles import (
    FLOATS,
    CacheArguments,
    Quantized,
    cache_arguments,
    head_codes,
    head_words,
    word_places,
)

MAX_GROUP = 8


@triton.jit
def _norm_and_rotate(
    first,
    second,
    rest,
    weight_ptr,
    eps,
    cos,
    sin,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Heads as [GROUP, …] float32: channels [0, HALF), [HALF, 2 * HALF) and the rest."""
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        dim = tl.arange(0, BLOCK_HALF)
        tail = tl.arange(0, BLOCK_REST) + 2 * HALF
        first *= scale * tl.load(weight_ptr + dim, mask=dim < HALF, other=0.0)[None, :]
        second *= scale * tl.load(weight_ptr + HALF + dim, mask=dim < HALF, other=0.0)[None, :]
        rest *= scale * tl.load(weight_ptr + tail, mask=tail < HEAD_DIM, other=0.0)[None, :]
    if ROTATE:
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    return first, second, rest


@triton.jit
def _store_quantized(
    codes_ptr,
    words_ptr,
    words,
    first,
    second,
    rest,
    in_half,
    in_rest,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Store heads, in three pieces as `_norm_and_rotate` has them, [GROUP, …] float32, as codes at
    codes_ptr, [GROUP, 1], and their words at words, [GROUP]. With 4 bits, there is no rest."""
    infinite: tl.constexpr = float("inf")
    lowest = tl.minimum(
        tl.min(tl.where(in_half, first, infinite), axis=1),
        tl.min(tl.where(in_half, second, infinite), axis=1),
    )
    highest = tl.maximum(
        tl.max(tl.where(in_half, first, -infinite), axis=1),
        tl.max(tl.where(in_half, second, -infinite), axis=1),
    )
    if BITS == 8:
        lowest = tl.minimum(lowest, tl.min(tl.where(in_rest, rest, infinite), axis=1))
        highest = tl.maximum(highest, tl.max(tl.where(in_rest, rest, -infinite), axis=1))
    scale, zero, word = head_words(lowest, highest, BITS)
    tl.store(words_ptr + words, word)
    kept = codes_ptr.dtype.element_ty
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    low = head_codes(first, scale, zero, BITS)
    high = head_codes(second, scale, zero, BITS)
    if BITS == 8:
        tail = tl.arange(0, BLOCK_REST)[None, :] + 2 * HALF
        tl.store(codes_ptr + dim, low.to(kept), mask=in_half)
        tl.store(codes_ptr + HALF + dim, high.to(kept), mask=in_half)
        last = head_codes(rest, scale, zero, BITS)
        tl.store(codes_ptr + tail, last.to(kept), mask=in_rest)
    else:
        tl.store(codes_ptr + dim, (low | (high << 4)).to(kept), mask=in_half)


@triton.jit
def _qk_norm_rope_cache_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    query_weight_ptr,
    key_weight_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_words_ptr,
    value_words_ptr,
    slot_ptr,
    query_eps,
    key_eps,
    key_factor,
    value_factor,
    stride_qkv,
    stride_cos_sin,
    stride_block,
    stride_slot,
    stride_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM_QUERY: tl.constexpr,
    NORM_KEY: tl.constexpr,
    CACHE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    FP8: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: GROUP heads of one token, all of them queries, keys or values."""
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * GROUP
    if PDL:
        gdc_wait()
    head = (first_head + tl.arange(0, GROUP))[:, None]
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    tail = tl.arange(0, BLOCK_REST)[None, :] + 2 * HALF
    in_half, in_rest = dim < HALF, tail < HEAD_DIM
    source = qkv_ptr + token * stride_qkv + head * HEAD_DIM
    raw_first = tl.load(source + dim, mask=in_half, other=0.0)
    raw_second = tl.load(source + HALF + dim, mask=in_half, other=0.0)
    raw_rest = tl.load(source + tail, mask=in_rest, other=0.0)
    # What follows starts when all of this has ended: attention's long programs, started beside
    # these, would crowd on some multiprocessors.
    dtype = qkv_ptr.dtype.element_ty
    in_cache = key_cache_ptr.dtype.element_ty
    cos = 1.0
    sin = 0.0
    if ROTATE:
        position = tl.load(positions_ptr + token).to(tl.int64)
        angles = cos_sin_ptr + position * stride_cos_sin + dim
        cos = tl.load(angles, mask=in_half, other=0.0)
        sin = tl.load(angles + HALF, mask=in_half, other=0.0)
    if first_head < NUM_HEADS:
        first, second, rest = _norm_and_rotate(
            raw_first.to(tl.float32),
            raw_second.to(tl.float32),
            raw_rest.to(tl.float32),
            query_weight_ptr,
            query_eps,
            cos,
            sin,
            NORM_QUERY,
            ROTATE,
            HEAD_DIM,
            HALF,
            BLOCK_HALF,
            BLOCK_REST,
        )
        tl.store(source + dim, first.to(dtype), mask=in_half)
        tl.store(source + HALF + dim, second.to(dtype), mask=in_half)
        tl.store(source + tail, rest.to(dtype), mask=in_rest)
    else:
        slot = 0
        if CACHE:
            slot = tl.load(slot_ptr + token).to(tl.int64)
        place = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
        if first_head < NUM_HEADS + NUM_KV_HEADS:
            first, second, rest = _norm_and_rotate(
                raw_first.to(tl.float32),
                raw_second.to(tl.float32),
                raw_rest.to(tl.float32),
                key_weight_ptr,
                key_eps,
                cos,
                sin,
                NORM_KEY,
                ROTATE,
                HEAD_DIM,
                HALF,
                BLOCK_HALF,
                BLOCK_REST,
            )
            tl.store(source + dim, first.to(dtype), mask=in_half)
            tl.store(source + HALF + dim, second.to(dtype), mask=in_half)
            tl.store(source + tail, rest.to(dtype), mask=in_rest)
            if CACHE:
                target = key_cache_ptr + place + (head - NUM_HEADS) * stride_head
                if KEY_BITS < 16:
                    # Rounded as other steps read them from the projection.
                    kv_heads = first_head - NUM_HEADS + tl.arange(0, GROUP)
                    words = word_places(
                        slot // BLOCK_SIZE, slot, kv_heads, NUM_KV_HEADS, BLOCK_SIZE
                    )
                    _store_quantized(
                        target, key_words_ptr, words, first.to(dtype).to(tl.float32),
                        second.to(dtype).to(tl.float32), rest.to(dtype).to(tl.float32),
                        in_half, in_rest, HALF, KEY_BITS, BLOCK_HALF, BLOCK_REST,
                    )  # fmt: skip
                else:
                    if FP8:
                        first *= key_factor
                        second *= key_factor
                        rest *= key_factor
                    tl.store(target + dim, first.to(in_cache), mask=in_half)
                    tl.store(target + HALF + dim, second.to(in_cache), mask=in_half)
                    tl.store(target + tail, rest.to(in_cache), mask=in_rest)
        else:
            if CACHE:
                kv_head = head - NUM_HEADS - NUM_KV_HEADS
                if VALUE_BITS < 16:
                    value_place = place + kv_head * stride_head
                    if VALUE_BITS < KEY_BITS:
                        value_place = value_place >> 1
                    kv_heads = first_head - NUM_HEADS - NUM_KV_HEADS + tl.arange(0, GROUP)
                    words = word_places(
                        slot // BLOCK_SIZE, slot, kv_heads, NUM_KV_HEADS, BLOCK_SIZE
                    )
                    _store_quantized(
                        value_cache_ptr + value_place, value_words_ptr, words,
                        raw_first.to(tl.float32), raw_second.to(tl.float32),
                        raw_rest.to(tl.float32), in_half, in_rest, HALF, VALUE_BITS, BLOCK_HALF,
                        BLOCK_REST,
                    )  # fmt: skip
                else:
                    target = value_cache_ptr + place + kv_head * stride_head
                    factor = value_factor if FP8 else 1.0
                    tl.store(
                        target + dim, (raw_first.to(tl.float32) * factor).to(in_cache), mask=in_half
                    )
                    tl.store(
                        target + HALF + dim,
                        (raw_second.to(tl.float32) * factor).to(in_cache),
                        mask=in_half,
                    )
                    tl.store(
                        target + tail, (raw_rest.to(tl.float32) * factor).to(in_cache), mask=in_rest
                    )


def qk_norm_rope_cache(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None = None,
    query_norm: tuple[torch.Tensor, float] | None = None,
    key_norm: tuple[torch.Tensor, float] | None = None,
    kv_cache: torch.Tensor | Quantized | None = None,
    slot_mapping: torch.Tensor | None = None,
    cache_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Norm and rotate queries and keys in place; store keys and values in the cache if it is given.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], last stride 1, queries first;
    positions: [num_tokens] int; cos_sin: [max_positions, rotary_dim] float32, cosines then sines,
    None: no rotation; norms: (weight [head_dim], eps); kv_cache: [2, num_blocks, block_size,
    num_kv_heads, head_dim] of qkv's type or fp8, last stride 1, or quantized, 4 bits needing a
    rotation of the whole head or none; slot_mapping: [num_tokens] int; cache_scales: divisors of
    keys and values that are written to an fp8 cache. Computed in float32, rounded once.
    """
    num_tokens, width = qkv.shape
    if num_tokens == 0:
        return
    head_dim = width // (num_heads + 2 * num_kv_heads)
    half = head_dim // 2 if cos_sin is None else cos_sin.shape[1] // 2
    group = min(num_kv_heads & -num_kv_heads, num_heads & -num_heads, MAX_GROUP)
    cached = kv_cache is not None
    cache = CacheArguments(qkv, qkv, None, None, FLOATS, FLOATS, num_kv_heads)
    if kv_cache is not None:
        cache = cache_arguments(kv_cache)
    if 2 * half != head_dim and min(cache.key_bits, cache.value_bits) == 4:
        raise ValueError(f"{2 * half} channels of {head_dim} are rotated: 4 bits pair other ones")
    programs = num_heads + (2 if cached else 1) * num_kv_heads
    options = pdl_options(qkv.device)
    launch(_qk_norm_rope_cache_kernel, (num_tokens, programs // group))(
        qkv,
        positions,
        cos_sin,
        None if query_norm is None else query_norm[0],
        None if key_norm is None else key_norm[0],
        *cache.tensors,
        slot_mapping,
        0.0 if query_norm is None else query_norm[1],
        0.0 if key_norm is None else key_norm[1],
        1.0 / cache_scales[0],
        1.0 / cache_scales[1],
        qkv.stride(0),
        0 if cos_sin is None else cos_sin.stride(0),
        *(cache.strides if cached else (0, 0, 0)),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        ROTATE=cos_sin is not None,
        NORM_QUERY=query_norm is not None,
        NORM_KEY=key_norm is not None,
        CACHE=cached,
        BLOCK_SIZE=cache.block_size if cached else 1,
        GROUP=group,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
        FP8=cache.is_fp8,
        KEY_BITS=cache.key_bits,
        VALUE_BITS=cache.value_bits,
        PDL=bool(options),
        num_warps=2,
        **options,
    )
