"""Products of one row with words of 4-bit numbers, on the tensor core.

A word holds 8 columns (parts), so a tile of words needs 8 slices of x, which fill the MMA's N = 8.
Only the diagonal of what it gives (part i times slice i) is kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .e2m1 import e2m1_unit, split_e2m1, unpack_e2m1
from .int4_unpack import multiply_pairs, unpack_int4


@triton.jit
def diagonal_sums(words, x, offs_part, correction, FLOATS: tl.constexpr):
    """words: [WARPS, BLOCK_N, BLOCK_K], x: [WARPS, BLOCK_K, 8], correction: [WARPS, BLOCK_N, 8]
    float32 → as correction: at index q, the sums of part q with slice q of x, plus `correction`.

    Of integers, a sum has `int4_base` times the sum of its slice besides. offs_part: 0 to 7, [1, 1,
    8].
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
