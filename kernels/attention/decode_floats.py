"""Tiles of a cache of floats, and how a decode row attends to them."""

from __future__ import annotations

import triton
import triton.language as tl

from .levels import level_numbers
from .quantized_tiles import widen_floats


@triton.jit
def float_tile(
    position,
    lower,
    newest,
    key_cache_ptr,
    value_cache_ptr,
    table,
    kv_head,
    dim,
    in_head,
    stride_block,
    stride_slot,
    stride_head,
    BLOCK_SIZE: tl.constexpr,
):
    """Load keys and values of positions [BLOCK_N] from `lower` to before `newest`: → keys, values
    [BLOCK_N, BLOCK_K] as they are cached, and which positions these are."""
    valid = (position >= lower) & (position < newest)
    block = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
    base = block * stride_block + (position % BLOCK_SIZE) * stride_slot + kv_head * stride_head
    places = base[:, None] + dim[None, :]
    mask = valid[:, None] & in_head[None, :]
    key = tl.load(key_cache_ptr + places, mask=mask, other=0.0)
    value = tl.load(value_cache_ptr + places, mask=mask, other=0.0)
    return key, value, valid


@triton.jit
def soft_capped(scores, SOFT_CAP: tl.constexpr):
    """Return SOFT_CAP tanh(scores / SOFT_CAP), or the scores if it is 0."""
    if SOFT_CAP > 0.0:
        # tanh, by the exponential that every target has.
        scores = SOFT_CAP * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / SOFT_CAP)))
    return scores


@triton.jit
def softmax_step(scores, m, total):
    """Return the weights of a tile's scores, [N] or [M, N] in units of log2; the running maximum
    and sum of weights with them; and what earlier weights are to be multiplied by.

    m, total: of earlier tiles, scalars or [M]. The new maximum is finite: the newest token is in m,
    or the tile holds a visible position.
    """
    AXIS: tl.constexpr = len(scores.shape) - 1
    m_new = tl.maximum(m, tl.max(scores, axis=AXIS))
    weights = tl.exp2(scores - (m_new[:, None] if AXIS == 1 else m_new))
    decay = tl.exp2(m - m_new)
    return weights, m_new, total * decay + tl.sum(weights, axis=AXIS), decay


@triton.jit
def attend_floats(
    acc,
    m,
    total,
    query,
    key,
    value,
    valid,
    distance,
    slope,
    scale,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Attend to a tile of float keys → acc, m, total. distance: [BLOCK_N] of each key to the newest
    token, at most 0.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    key = widen_floats(key, query.dtype, True)
    value = widen_floats(value, query.dtype, False)
    if query.shape[0] == 1:
        # A head alone needs no matrix unit, whose operands come through shared memory.
        scores = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1) * scale
        scores = soft_capped(scores, SOFT_CAP)
        if ALIBI:
            scores += tl.sum(slope, axis=0) * distance
        scores = tl.where(valid, scores * LOG2E, -float("inf"))
        weights, m_new, total, decay = softmax_step(scores, tl.sum(m, axis=0), total)
        more = tl.sum(weights[:, None] * value.to(tl.float32), axis=0)
        return acc * decay + more[None, :], tl.zeros_like(m) + m_new, total
    else:
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = soft_capped(scores, SOFT_CAP)
        if ALIBI:
            scores += slope[:, None] * distance[None, :]
        scores = tl.where(valid[None, :], scores * LOG2E, -float("inf"))
        weights, m, total, decay = softmax_step(scores, m, total)
        acc = acc * decay[:, None] + tl.dot(weights.to(query.dtype), value, input_precision="ieee")
        return acc, m, total


@triton.jit
def attend_split(
    acc,
    m,
    total,
    query,
    begin_tile,
    end_tile,
    lower,
    newest,
    key_cache_ptr,
    value_cache_ptr,
    table,
    kv_head,
    dim,
    in_head,
    slope,
    scale,
    stride_block,
    stride_slot,
    stride_head,
    BLOCK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to the cached tiles of a split of float keys → acc, m, total."""
    for tile in range(begin_tile, end_tile):
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        key, value, valid = float_tile(
            position, lower, newest, key_cache_ptr, value_cache_ptr, table, kv_head, dim, in_head,
            stride_block, stride_slot, stride_head, BLOCK_SIZE,
        )  # fmt: skip
        acc, m, total = attend_floats(
            acc, m, total, query, key, value, valid, position - newest, slope, scale, SOFT_CAP,
            ALIBI,
        )  # fmt: skip
    return acc, m, total


@triton.jit
def attend_ahead(
    acc,
    m,
    total,
    query,
    key,
    value,
    valid,
    begin_tile,
    end_tile,
    lower,
    newest,
    key_cache_ptr,
    value_cache_ptr,
    table,
    kv_head,
    dim,
    in_head,
    slope,
    scale,
    stride_block,
    stride_slot,
    stride_head,
    BLOCK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
):
    """As `attend_split`, whose first TILES tiles the caller has loaded (`float_tile`). While these
    are attended to, as many more come to registers: with little shared memory, this kernel's
    programs can lie beside those of a product."""
    position = begin_tile * BLOCK_N + tl.arange(0, BLOCK_N * TILES)
    for tile in tl.range(begin_tile + TILES, end_tile, TILES, num_stages=1):
        later_position = tile * BLOCK_N + tl.arange(0, BLOCK_N * TILES)
        later_key, later_value, later_valid = float_tile(
            later_position, lower, tl.minimum(newest, end_tile * BLOCK_N), key_cache_ptr,
            value_cache_ptr, table, kv_head, dim, in_head, stride_block, stride_slot, stride_head,
            BLOCK_SIZE,
        )  # fmt: skip
        acc, m, total = attend_floats(
            acc, m, total, query, key, value, valid, position - newest, slope, scale, SOFT_CAP,
            ALIBI,
        )  # fmt: skip
        key, value, valid, position = later_key, later_value, later_valid, later_position
    return attend_floats(
        acc, m, total, query, key, value, valid, position - newest, slope, scale, SOFT_CAP, ALIBI
    )


@triton.jit
def attend_level(
    acc, m, total, query, begin_tile, end_tile, count, key_cache_ptr, value_cache_ptr, table,
    kv_head, slope, scale, BITS: tl.constexpr, TOKENS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_BYTES: tl.constexpr, SOFT_CAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attend to tiles of a level's `count` tokens, whose blocks `table` begins with → acc, m,
    total."""
    for tile in range(begin_tile, end_tile):
        place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = place < count
        block = tl.load(table + place // TOKENS, mask=valid, other=0).to(tl.int64)
        place = place % TOKENS
        key = level_numbers(
            key_cache_ptr, block, place, valid, kv_head, BITS, TOKENS, NUM_KV_HEADS, HEAD_DIM,
            BLOCK_BYTES, BLOCK_D, True, query.dtype,
        )  # fmt: skip
        value = level_numbers(
            value_cache_ptr, block, place, valid, kv_head, BITS, TOKENS, NUM_KV_HEADS, HEAD_DIM,
            BLOCK_BYTES, BLOCK_D, False, query.dtype,
        )  # fmt: skip
        acc, m, total = attend_floats(
            acc, m, total, query, key, value, valid, place, slope, scale, SOFT_CAP, False
        )
    return acc, m, total
