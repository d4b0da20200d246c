"""Where the tokens of a row are whose cache has levels (`core.cache.levels`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .quantized_tiles import dequantized, word_scale, word_zero

MOST_LEVELS = 3


class LevelRows(NamedTuple):
    """Rows whose first blocks have tokens in levels."""

    tokens: torch.Tensor
    """[num_slots, L] int32: those in each level."""
    formats: tuple[tuple[int, int], ...]
    """[L] Bits (16, 8 or 4), and tokens of a block."""
    slots: torch.Tensor
    """[rows] Each row's place in `tokens`."""


def level_arguments(
    levels: LevelRows | None, other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensors of a launch; without levels `other`, which is not read."""
    return (other, other) if levels is None else (levels.tokens, levels.slots)


@functools.cache
def level_constants(formats: tuple[tuple[int, int], ...]) -> Mapping[str, int]:
    """Return what kernels are compiled for. formats: bits, and tokens of a block, of each level"""
    constants = {"LEVELS": len(formats)}
    padded = [*formats, *[(16, 1)] * (MOST_LEVELS - len(formats))]
    for number, (bits, tokens) in enumerate(padded, 1):
        constants |= {f"BITS_{number}": bits, f"TOKENS_{number}": tokens}
    return constants


@triton.jit
def level_counts(levels_ptr, slot, LEVELS: tl.constexpr):
    """Return the tokens of each of three levels. slot: int64, the row's place"""
    own = levels_ptr + slot * LEVELS
    first = tl.load(own)
    second = first * 0
    third = first * 0
    if LEVELS > 1:
        second = tl.load(own + 1)
    if LEVELS > 2:
        third = tl.load(own + 2)
    return first, second, third


@triton.jit
def level_columns(
    first, second, third, TOKENS_1: tl.constexpr, TOKENS_2: tl.constexpr, TOKENS_3: tl.constexpr
):
    """Return the columns after each level's blocks: the next level's, or the newest tokens'."""
    end_1 = tl.cdiv(first, TOKENS_1)
    end_2 = end_1 + tl.cdiv(second, TOKENS_2)
    return end_1, end_2, end_2 + tl.cdiv(third, TOKENS_3)


@triton.jit
def level_tiles(first, second, third, BLOCK_N: tl.constexpr):
    """Return the number of tiles up to the end of each level."""
    end_1 = tl.cdiv(first, BLOCK_N)
    end_2 = end_1 + tl.cdiv(second, BLOCK_N)
    return end_1, end_2, end_2 + tl.cdiv(third, BLOCK_N)


@triton.jit
def level_numbers(
    part_ptr, block, place, inside, kv_head, BITS: tl.constexpr, TOKENS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    BLOCK_K: tl.constexpr, MOVABLE: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return the numbers of tokens as a level stores them, [N, BLOCK_K] of `dtype`. part_ptr: keys
    or values of all blocks; block: [N] int64; place: [N], in its block; inside: [N]"""
    WIDTH: tl.constexpr = HEAD_DIM * BITS // 8
    channel = tl.arange(0, BLOCK_K)
    at = block * BLOCK_BYTES + (place * NUM_KV_HEADS + kv_head) * WIDTH
    if BITS == 16:
        own = part_ptr + block * (TOKENS * NUM_KV_HEADS * HEAD_DIM)
        own += (place * NUM_KV_HEADS + kv_head) * HEAD_DIM
        mask = inside[:, None] & (channel < HEAD_DIM)[None, :]
        return tl.load(own[:, None] + channel[None, :], mask=mask, other=0.0).to(dtype)
    else:
        words_at = block * (BLOCK_BYTES // 4) + TOKENS * NUM_KV_HEADS * WIDTH // 4
        words_ptr = part_ptr.to(tl.pointer_type(tl.int32)) + words_at + kv_head * TOKENS + place
        words = tl.load(words_ptr, mask=inside, other=0)
        codes_ptr = part_ptr.to(tl.pointer_type(tl.int8 if BITS == 8 else tl.uint8))
        if BITS == 8 and HEAD_DIM == BLOCK_K:
            codes = tl.load(
                codes_ptr + at[:, None] + channel[None, :], mask=inside[:, None], other=0
            )
            return dequantized(codes, words, dtype, MOVABLE, 8)
        elif BITS == 4 and HEAD_DIM == BLOCK_K:
            half = tl.arange(0, BLOCK_K // 2)
            codes = tl.load(codes_ptr + at[:, None] + half[None, :], mask=inside[:, None], other=0)
            return dequantized(codes, words, dtype, MOVABLE, 4)
        else:
            # Byte i of 4 bits has channels i and i + WIDTH.
            mask = inside[:, None] & (channel < HEAD_DIM)[None, :]
            byte = channel % WIDTH
            codes = tl.load(codes_ptr + at[:, None] + byte[None, :], mask=mask, other=0)
            codes = codes.to(tl.int32)
            numbers = codes.to(tl.float32)
            if BITS == 4:
                numbers = ((codes >> (4 * (channel // WIDTH))[None, :]) & 15).to(tl.float32) - 7.5
            numbers = word_zero(words)[:, None] + word_scale(words)[:, None] * numbers
            return tl.where(mask, numbers, 0.0).to(dtype)
