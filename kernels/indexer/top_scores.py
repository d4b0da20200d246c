"""Steps of kernels that find the highest scores of a row without sorting it.

The lowest score that stays is found 2 bits at a time, with one pass over the row for each; then the
scores at or above it are kept in order, among equal ones the earlier.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_TILE = 4096
"""Scores that a program looks at together."""
LOWEST = tl.constexpr(-(1 << 31))


@triton.jit
def _ordered(row, place, inside):
    bits = tl.load(row + place, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, LOWEST - bits, bits)


@triton.jit
def lowest_kept(row, num_scores, num_kept, BLOCK: tl.constexpr):
    """Return the lowest of the `num_kept` highest scores as an integer of the same order, and how
    many of those equal to it stay. row: float32 [num_scores]; NaN are in the order of their bits,
    so that of any numbers as many stay."""
    offs = tl.arange(0, BLOCK)
    # The highest limit with num_kept scores at or above it.
    limit = tl.full((), LOWEST, tl.int32)
    # How many are higher than all whose leading bits are those of the limit.
    above = tl.zeros((), tl.int32)
    for step in range(16):
        unit = tl.full((), 1, tl.int32) << (30 - 2 * step)
        first = limit + unit
        second = first + unit
        third = second + unit
        # Of each place in a tile, in 16 bits, since tiles are few: how many are `first` or higher,
        # and above that `second` or higher.
        lower = tl.zeros([BLOCK], tl.int32)
        upper = tl.zeros([BLOCK], tl.int32)
        for start in range(0, num_scores, BLOCK):
            place = start + offs
            inside = place < num_scores
            order = _ordered(row, place, inside)
            both = tl.where(order >= second, (1 << 16) + 1, 1)
            lower += tl.where(inside & (order >= first), both, 0)
            upper += (inside & (order >= third)).to(tl.int32)
        from_first = tl.sum(lower & 0xFFFF)
        from_second = tl.sum(lower >> 16)
        from_third = tl.sum(upper)
        above = tl.where(from_third < num_kept, from_third, above)
        above = tl.where(from_second < num_kept, from_second, above)
        above = tl.where(from_first < num_kept, from_first, above)
        limit = tl.where(from_first < num_kept, limit, first)
        limit = tl.where(from_second < num_kept, limit, second)
        limit = tl.where(from_third < num_kept, limit, third)
    return limit, num_kept - above


@triton.jit
def kept_of_tile(row, place, num_scores, limit, num_equal, written):
    """Return which scores at `place` stay, each one's index among all that stay, and the number of
    ties and of all that stay up to here. num_equal: ties with `limit` still to keep; written: how
    many before `place` stay.
    """
    inside = place < num_scores
    order = _ordered(row, place, inside)
    equal = (inside & (order == limit)).to(tl.int32)
    stays = (inside & (order > limit)) | ((equal != 0) & (tl.cumsum(equal) <= num_equal))
    number = written + tl.cumsum(stays.to(tl.int32)) - 1
    num_equal -= tl.minimum(tl.sum(equal), num_equal)
    return stays, number, num_equal, written + tl.sum(stays.to(tl.int32))
