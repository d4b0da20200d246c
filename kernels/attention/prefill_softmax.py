"""The running softmax of a tile of prompt queries over tiles of cached keys."""

from __future__ import annotations

import triton
import triton.language as tl

from .quantized_tiles import dequantized, widen_floats, word_places
from .reach import last_hidden


@triton.jit
def _attend(
    acc,
    m,
    total,
    query,
    position_q,
    tile_begin,
    tile_end,
    key_base,
    value_base,
    key_words_ptr,
    value_words_ptr,
    kv_head,
    table,
    lower,
    seq_len,
    slope,
    scale,
    stride_block,
    stride_slot,
    NUM_KV_HEADS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DISTANCES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold the keys of tiles [tile_begin, tile_end) into the running softmax.

    acc: [M, channels]; query: of `product_dtype` over a cache of floats.
    Without MASKED every query of the tile sees all of these keys. No query sees a key before
    `lower`: blocks before it may have been freed.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = _first_value(BLOCK_V, VALUE_PARTS) + tl.arange(0, BLOCK_V)
    mask_k = (offs_k < KEY_WIDTH)[None, :]
    mask_v = (offs_v < VALUE_WIDTH)[None, :]
    for tile in range(tile_begin, tile_end):
        position = tile * BLOCK_N + offs_n
        if MASKED:
            valid = position < seq_len
            if WINDOW > 0:
                valid = valid & (position >= lower)
            block = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        else:
            block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        base = block * stride_block + (position % BLOCK_SIZE) * stride_slot
        value_start = base
        if VALUE_BITS < KEY_BITS:
            value_start = base >> 1
        key_places = base[:, None] + offs_k[None, :]
        value_places = value_start[:, None] + offs_v[None, :]
        if MASKED:
            key = tl.load(key_base + key_places, mask=valid[:, None] & mask_k, other=0.0)
            value = tl.load(value_base + value_places, mask=valid[:, None] & mask_v, other=0.0)
        elif KEY_WIDTH != BLOCK_K or VALUE_WIDTH != BLOCK_V * VALUE_PARTS:
            key = tl.load(key_base + key_places, mask=mask_k, other=0.0)
            value = tl.load(value_base + value_places, mask=mask_v, other=0.0)
        else:
            key = tl.load(key_base + key_places)
            value = tl.load(value_base + value_places)
        if KEY_BITS == 16:
            key = widen_floats(key, query.dtype, True)
            value = widen_floats(value, query.dtype, False)
        else:
            words = word_places(block, position, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
            if MASKED:
                key_words = tl.load(key_words_ptr + words, mask=valid, other=0)
                value_words = tl.load(value_words_ptr + words, mask=valid, other=0)
            else:
                key_words = tl.load(key_words_ptr + words)
                value_words = tl.load(value_words_ptr + words)
            key = dequantized(key, key_words, query.dtype, True, KEY_BITS)
            value = dequantized(value, value_words, query.dtype, False, VALUE_BITS)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if SOFT_CAP > 0.0:
            scores = SOFT_CAP * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scale * scores / SOFT_CAP)))
            scores = scores * LOG2E
        else:
            scores = scores * (scale * LOG2E)
        if ALIBI:
            away = position[None, :] - position_q[:, None]
            scores += (slope * LOG2E)[:, None] * away
        if DISTANCES > 0:
            away = position_q[:, None] - position[None, :]
            away = tl.minimum(tl.maximum(away, 0), DISTANCES - 1)
            scores += tl.load(slope[:, None] + away).to(tl.float32) * LOG2E
        if MASKED:
            visible = position[None, :] <= position_q[:, None]
            if WINDOW > 0:
                hidden = last_hidden(position_q, WINDOW, CHUNK)
                visible = visible & (position[None, :] > hidden[:, None])
            scores = tl.where(visible, scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        # In masked tiles before its first visible key a query sees no key: stay at 0, not NaN.
        pivot = m_new
        if MASKED:
            pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
        weights = tl.exp2(scores - pivot[:, None])
        decay = tl.exp2(m - pivot)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(query.dtype), value, acc, input_precision="ieee")
        m = m_new
    return acc, m, total


@triton.jit
def _first_value(BLOCK_V: tl.constexpr, VALUE_PARTS: tl.constexpr):
    first = 0
    if VALUE_PARTS > 1:
        first = tl.program_id(2) * BLOCK_V
    return first
