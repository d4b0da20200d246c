"""Products of one row with words of 4-bit numbers, on the tensor core.

A word holds 8 columns (parts), so a tile of words needs 8 slices of x, which fill the MMA's N = 8.
Only the diagonal of the product (part i times slice i) is kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .e2m1 import e2m1_unit, split_e2m1, unpack_e2m1
from .int4_unpack import int4_base, multiply_pairs, unpack_int4


@triton.jit
def diagonal_sums(words, x, offs_part, correction, FLOATS: tl.constexpr):
    """words: [WARPS, BLOCK_N, BLOCK_K], x: [WARPS, BLOCK_K, 8], correction: [WARPS, BLOCK_N, 8]
    float32 → as correction: at index q, the sums of part q with slice q of x, plus `correction`.

    For integers, sums also contain `int4_base` times the sum of x's slice. offs_part: 0 to 7, [1,
    1, 8].
    """
    parts = split_e2m1(words) if FLOATS else unpack_int4(words, x.dtype)
    sums = correction
    for part in tl.static_range(8):
        if FLOATS:
            value = unpack_e2m1(parts, part, x.dtype)
            value = multiply_pairs(value, tl.full(value.shape, e2m1_unit(x.dtype), x.dtype))
        else:
            value = parts[part]
        part_sums = tl.dot(value, x, correction, input_precision="ieee")
        sums = part_sums if part == 0 else tl.where(offs_part == part, part_sums, sums)
    return sums


@triton.jit
def word_constants(
    dtype: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr, WARPS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return a tile whose product with x is the `correction` of `diagonal_sums`, [WARPS, BLOCK_N,
    BLOCK_K]: it subtracts the base, and without zeros the offset.
    """
    SUBTRACT: tl.constexpr = int4_base(dtype) if ZERO else int4_base(dtype) + OFFSET
    return tl.full([WARPS, BLOCK_N, BLOCK_K], -SUBTRACT, dtype)


@triton.jit
def scaled_sums(
    words, x, scale, zero_ptrs, in_scale, offs_part, correction, FLOATS: tl.constexpr,
    ZERO: tl.constexpr,
):  # fmt: skip
    """Return `diagonal_sums` less the zeros, of integers with ZERO, times the scales, as
    `correction`. scale: of each part; zero_ptrs, in_scale: where their zeros are, and which
    exist"""
    sums = diagonal_sums(words, x, offs_part, correction, FLOATS)
    if ZERO:
        # The base is a power of two.
        BASE: tl.constexpr = int4_base(x.dtype)
        zero = tl.load(zero_ptrs, mask=in_scale, other=0)
        sums += zero.to(tl.float32) * (correction * (1.0 / BASE))
    return sums * scale.to(tl.float32)
