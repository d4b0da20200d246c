"""The new token of a decode row: its key and value, on their way to the cache."""

from __future__ import annotations

import triton
import triton.language as tl

from .quantized_tiles import quantized_heads, word_places


@triton.jit
def _place(slot, kv_head, stride_block, stride_slot, stride_head, BLOCK_SIZE: tl.constexpr):
    place = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
    return place + kv_head * stride_head


@triton.jit
def cached_new_token(
    new_key,
    new_value,
    slot,
    kv_head,
    key_cache_ptr,
    value_cache_ptr,
    key_factor,
    value_scale,
    dim,
    mask_new,
    stride_block,
    stride_slot,
    stride_head,
    BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Write a head's new key and value, [1, BLOCK] each, to their slot. Return them as later steps
    will read them.
    """
    place = _place(slot, kv_head, stride_block, stride_slot, stride_head, BLOCK_SIZE)
    key_target = key_cache_ptr + place + dim[None, :]
    value_target = value_cache_ptr + place + dim[None, :]
    if FP8:
        kept = key_cache_ptr.dtype.element_ty
        new_key = (new_key.to(tl.float32) * key_factor).to(kept)
        new_value = (new_value.to(tl.float32) / value_scale).to(kept)
    tl.store(key_target, new_key, mask=mask_new)
    tl.store(value_target, new_value, mask=mask_new)
    return new_key, new_value


@triton.jit
def quantized_new_token(
    new_key,
    key_high,
    new_value,
    value_high,
    slot,
    kv_head,
    key_cache_ptr,
    value_cache_ptr,
    key_words_ptr,
    value_words_ptr,
    dim,
    mask_new,
    dim_v,
    mask_value,
    stride_block,
    stride_slot,
    stride_head,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
):
    """As `cached_new_token`, for codes with their words; 4 bits come in two halves of a head."""
    place = _place(slot, kv_head, stride_block, stride_slot, stride_head, BLOCK_SIZE)
    value_place = place
    if VALUE_BITS < KEY_BITS:
        value_place = place >> 1
    key_target = key_cache_ptr + place + dim[None, :]
    value_target = value_cache_ptr + value_place + dim_v[None, :]
    key_codes, key_words, new_key, key_high = quantized_heads(
        new_key.to(tl.float32), key_high.to(tl.float32), mask_new, KEY_BITS
    )
    value_codes, value_words, new_value, value_high = quantized_heads(
        new_value.to(tl.float32), value_high.to(tl.float32), mask_value, VALUE_BITS
    )
    tl.store(key_target, key_codes.to(key_cache_ptr.dtype.element_ty), mask=mask_new)
    value_codes = value_codes.to(value_cache_ptr.dtype.element_ty)
    tl.store(value_target, value_codes, mask=mask_value)
    words = word_places(slot // BLOCK_SIZE, slot, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
    words += tl.zeros([1], tl.int64)
    tl.store(key_words_ptr + words, key_words)
    tl.store(value_words_ptr + words, value_words)
    return new_key, key_high, new_value, value_high
