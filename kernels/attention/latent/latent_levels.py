"""Cached latents of which the older ones have fewer bits (`core.cache.levels`).

Tiles are counted through the levels, then through the newest tokens. As many channels of an entry
as `core.nn.kv_cache.level_cache.latent_group` says have a scale and a zero together: a tile's words
are loaded for each channel, of which all but the first loads of a group come from the nearest
cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..levels import LevelRows, level_columns, level_counts, level_tiles
from ..quantized_tiles import word_scale, word_zero
from .latent_fold import fold_latents, latent_tile


def level_sizes(
    levels: LevelRows | None, cache: torch.Tensor, channels: int | None
) -> dict[str, int]:
    """Return the constants of a launch besides `level_constants`. cache: contiguous with levels;
    channels: that have a scale and a zero together
    """
    if levels is None:
        return {"CHANNELS": 1, "BLOCK_BYTES": 0}
    assert channels is not None, "levels have groups of channels"
    return {"CHANNELS": channels, "BLOCK_BYTES": cache[0].nbytes}


@triton.jit
def _level_channels(
    cache_ptr, block, place, valid, channel, BITS: tl.constexpr, TOKENS: tl.constexpr,
    CACHE_DIM: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    LIMIT: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return channels, [K], up to LIMIT, of entries in a level, [N, K]. block: [N] int64; place:
    [N]"""
    mask = valid[:, None] & (channel < LIMIT)[None, :]
    if BITS == 16:
        own = cache_ptr + block * (TOKENS * CACHE_DIM) + place * CACHE_DIM
        return tl.load(own[:, None] + channel[None, :], mask=mask, other=0.0).to(dtype)
    else:
        WIDTH: tl.constexpr = CHANNELS * BITS // 8
        group = channel // CHANNELS
        inside = channel % CHANNELS
        words_at = block * (BLOCK_BYTES // 4) + (TOKENS * CACHE_DIM * BITS // 32) + place
        words_ptr = cache_ptr.to(tl.pointer_type(tl.int32))
        words = tl.load(
            words_ptr + words_at[:, None] + (group * TOKENS)[None, :], mask=mask, other=0
        )
        codes_ptr = cache_ptr.to(tl.pointer_type(tl.int8 if BITS == 8 else tl.uint8))
        codes_at = block * BLOCK_BYTES + place * (CACHE_DIM * BITS // 8)
        byte = group * WIDTH + inside % WIDTH
        codes = tl.load(codes_ptr + codes_at[:, None] + byte[None, :], mask=mask, other=0)
        codes = codes.to(tl.int32)
        if BITS == 4:
            # Byte i of a group has its channels i and i + WIDTH.
            codes = (codes >> (4 * (inside // WIDTH))[None, :]) & 15
            numbers = word_zero(words) + word_scale(words) * (codes.to(tl.float32) - 7.5)
        else:
            numbers = word_zero(words) + word_scale(words) * codes.to(tl.float32)
        return tl.where(mask, numbers, 0.0).to(dtype)


@triton.jit
def _attend_level(
    acc, m, total, absorbed, turned, begin, end, count, table, cache_ptr, scale,
    BITS: tl.constexpr, TOKENS: tl.constexpr, LATENT_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_BYTES: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Fold tiles [begin, end) of a level's `count` tokens, whose blocks `table` begins with."""
    CACHE_DIM: tl.constexpr = LATENT_DIM + ROPE_DIM
    for tile in range(begin, end):
        place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = place < count
        block = tl.load(table + place // TOKENS, mask=valid, other=0).to(tl.int64)
        place = place % TOKENS
        latent = _level_channels(
            cache_ptr, block, place, valid, tl.arange(0, BLOCK_L), BITS, TOKENS, CACHE_DIM,
            CHANNELS, BLOCK_BYTES, LATENT_DIM, absorbed.dtype,
        )  # fmt: skip
        shared = _level_channels(
            cache_ptr, block, place, valid, LATENT_DIM + tl.arange(0, BLOCK_R), BITS, TOKENS,
            CACHE_DIM, CHANNELS, BLOCK_BYTES, CACHE_DIM, absorbed.dtype,
        )  # fmt: skip
        acc, m, total = fold_latents(acc, m, total, absorbed, turned, latent, shared, valid, scale)
    return acc, m, total


@triton.jit
def leveled_latent_tiles(
    length, levels_ptr, slots_ptr, row, LEVELS: tl.constexpr, TOKENS_1: tl.constexpr,
    TOKENS_2: tl.constexpr, TOKENS_3: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the tiles of a row of this length, which counts a level's block as a whole one."""
    if LEVELS == 0:
        return tl.cdiv(length, BLOCK_N)
    else:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        first, second, third = level_counts(levels_ptr, slot, LEVELS)
        _, _, column = level_columns(first, second, third, TOKENS_1, TOKENS_2, TOKENS_3)
        _, _, end = level_tiles(first, second, third, BLOCK_N)
        return end + tl.cdiv(tl.maximum(length - column * BLOCK_SIZE, 0), BLOCK_N)


@triton.jit
def attend_latents(
    absorbed, turned, begin, end, length, table, cache_ptr, scale, stride_block, stride_slot,
    levels_ptr, slots_ptr, row, LATENT_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, LEVELS: tl.constexpr, BITS_1: tl.constexpr, TOKENS_1: tl.constexpr,
    BITS_2: tl.constexpr, TOKENS_2: tl.constexpr, BITS_3: tl.constexpr, TOKENS_3: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_BYTES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Attend to tiles [begin, end) of `leveled_latent_tiles`, places up to `length`: absorbed
    [BLOCK_M, BLOCK_L] and turned [BLOCK_M, BLOCK_R] see all of them. Returns the sum [BLOCK_M,
    BLOCK_L] float32, the maximum score in units of log2, and the sum of weights.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    lower = 0
    if LEVELS > 0:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        first, second, third = level_counts(levels_ptr, slot, LEVELS)
        column_2, column_3, column = level_columns(
            first, second, third, TOKENS_1, TOKENS_2, TOKENS_3
        )
        end_1, end_2, end_3 = level_tiles(first, second, third, BLOCK_N)
        acc, m, total = _attend_level(
            acc, m, total, absorbed, turned, begin, tl.minimum(end, end_1), first, table, cache_ptr,
            scale, BITS_1, TOKENS_1, LATENT_DIM, ROPE_DIM, CHANNELS, BLOCK_BYTES, BLOCK_N, BLOCK_L,
            BLOCK_R,
        )  # fmt: skip
        if LEVELS > 1:
            acc, m, total = _attend_level(
                acc, m, total, absorbed, turned, tl.maximum(begin - end_1, 0),
                tl.minimum(end, end_2) - end_1, second, table + column_2, cache_ptr, scale, BITS_2,
                TOKENS_2, LATENT_DIM, ROPE_DIM, CHANNELS, BLOCK_BYTES, BLOCK_N, BLOCK_L, BLOCK_R,
            )  # fmt: skip
        if LEVELS > 2:
            acc, m, total = _attend_level(
                acc, m, total, absorbed, turned, tl.maximum(begin - end_2, 0),
                tl.minimum(end, end_3) - end_2, third, table + column_3, cache_ptr, scale, BITS_3,
                TOKENS_3, LATENT_DIM, ROPE_DIM, CHANNELS, BLOCK_BYTES, BLOCK_N, BLOCK_L, BLOCK_R,
            )  # fmt: skip
        lower = column * BLOCK_SIZE
        begin = tl.maximum(begin - end_3, 0)
        end = end - end_3
    for tile in range(begin, end):
        place = lower + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = place < length
        latent, shared = latent_tile(
            place, valid, table, cache_ptr, stride_block, stride_slot, LATENT_DIM, ROPE_DIM,
            BLOCK_SIZE, BLOCK_L, BLOCK_R,
        )  # fmt: skip
        acc, m, total = fold_latents(acc, m, total, absorbed, turned, latent, shared, valid, scale)
    return acc, m, total
