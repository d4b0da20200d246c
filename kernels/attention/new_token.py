"""The new token of a decode row: its key and value, made from the projection and written to the
cache."""

from __future__ import annotations

import triton
import triton.language as tl

from .projected_heads import _half_heads, _head
from .quantized_tiles import quantized_heads, word_places


@triton.jit
def cached_new_token(
    new,
    slot_ptr,
    kv_head,
    key_cache_ptr,
    value_cache_ptr,
    key_words_ptr,
    value_words_ptr,
    key_weight_ptr,
    key_eps,
    cos,
    sin,
    key_factor,
    value_scale,
    dim,
    in_head,
    dim_v,
    in_value,
    stride_block,
    stride_slot,
    stride_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM_KEY: tl.constexpr,
    NORM_LAST: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP8: tl.constexpr,
):
    """Write a head's new key, normed and rotated, and its value to their slot. new: where the
    projection has the key, [1, 1] pointers; the value is NUM_KV_HEADS heads behind it.

    Return key and value, [1, BLOCK], rounded as they are stored and as later steps will read them,
    and the upper halves of those of 4 bits.
    """
    dtype = new.dtype.element_ty
    HALF: tl.constexpr = HEAD_DIM // 2
    mask_new = in_head[None, :]
    mask_value = in_value[None, :]
    if KEY_BITS == 4:
        new_key, key_high = _half_heads(
            new, key_weight_ptr, key_eps, cos, sin, mask_new, NORM_KEY, ROTARY_DIM, NORM_LAST,
            HEAD_DIM, BLOCK_K,
        )  # fmt: skip
        key_high = key_high.to(dtype)
    else:
        new_key = _head(
            new, key_weight_ptr, key_eps, cos, sin, mask_new, NORM_KEY, ROTARY_DIM, NORM_LAST,
            HEAD_DIM, BLOCK_K,
        )  # fmt: skip
        key_high = new_key
    new_key = new_key.to(dtype)
    new += NUM_KV_HEADS * HEAD_DIM
    new_value = tl.load(new + dim_v[None, :], mask=mask_value, other=0.0)
    value_high = new_value
    if VALUE_BITS == 4:
        value_high = tl.load(new + HALF + dim_v[None, :], mask=mask_value, other=0.0)
    slot = tl.load(slot_ptr).to(tl.int64)
    place = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
    place = place + kv_head * stride_head
    value_place = place
    if VALUE_BITS < KEY_BITS:
        value_place = place >> 1
    key_target = key_cache_ptr + place + dim[None, :]
    value_target = value_cache_ptr + value_place + dim_v[None, :]
    kept = key_cache_ptr.dtype.element_ty
    if KEY_BITS < 16:
        key_codes, key_words, new_key, key_high = quantized_heads(
            new_key.to(tl.float32), key_high.to(tl.float32), mask_new, KEY_BITS
        )
        value_codes, value_words, new_value, value_high = quantized_heads(
            new_value.to(tl.float32), value_high.to(tl.float32), mask_value, VALUE_BITS
        )
        tl.store(key_target, key_codes.to(kept), mask=mask_new)
        value_codes = value_codes.to(value_cache_ptr.dtype.element_ty)
        tl.store(value_target, value_codes, mask=mask_value)
        words = word_places(slot // BLOCK_SIZE, slot, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
        words += tl.zeros([1], tl.int64)
        tl.store(key_words_ptr + words, key_words)
        tl.store(value_words_ptr + words, value_words)
    else:
        if FP8:
            new_key = (new_key.to(tl.float32) * key_factor).to(kept)
            new_value = (new_value.to(tl.float32) / value_scale).to(kept)
        tl.store(key_target, new_key, mask=mask_new)
        tl.store(value_target, new_value, mask=mask_value)
    return new_key, key_high, new_value, value_high
