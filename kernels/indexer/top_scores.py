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
    """Return scores as integers of the same order; -0.0 as 0.0."""
    score = tl.load(row + place, mask=inside, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def lowest_kept(row, num_scores, num_kept, BLOCK: tl.constexpr):
    """Return the lowest of the `num_kept` highest scores as an integer of the same order, and how
    many of those equal to it stay. row: float32 [num_scores], none NaN."""
    offs = tl.arange(0, BLOCK)
    # The highest limit with num_kept scores at or above it.
    limit = tl.full((), LOWEST, tl.int32)
    for step in range(16):
        unit = tl.full((), 1, tl.int32) << (30 - 2 * step)
        first = tl.zeros([BLOCK], tl.int32)
        second = tl.zeros([BLOCK], tl.int32)
        third = tl.zeros([BLOCK], tl.int32)
        for start in range(0, num_scores, BLOCK):
            place = start + offs
            inside = place < num_scores
            order = _ordered(row, place, inside)
            first += (inside & (order >= limit + unit)).to(tl.int32)
            second += (inside & (order >= limit + unit + unit)).to(tl.int32)
            third += (inside & (order >= limit + unit + unit + unit)).to(tl.int32)
        digit = (tl.sum(first) >= num_kept).to(tl.int32)
        digit += (tl.sum(second) >= num_kept).to(tl.int32)
        digit += (tl.sum(third) >= num_kept).to(tl.int32)
        limit += digit * unit
    above = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_scores, BLOCK):
        place = start + offs
        inside = place < num_scores
        above += (inside & (_ordered(row, place, inside) > limit)).to(tl.int32)
    return limit, num_kept - tl.sum(above)


@triton.jit
def kept_of_tile(row, place, num_scores, limit, num_equal, written):
    """Return which scores at `place` stay, the number of each among all that stay, `num_equal`
    without those that were, and the number that stay up to here. num_equal: how many more equal to
    `limit` stay; written: how many of the places before stay."""
    inside = place < num_scores
    order = _ordered(row, place, inside)
    equal = (inside & (order == limit)).to(tl.int32)
    stays = (inside & (order > limit)) | ((equal != 0) & (tl.cumsum(equal) <= num_equal))
    number = written + tl.cumsum(stays.to(tl.int32)) - 1
    num_equal -= tl.minimum(tl.sum(equal), num_equal)
    return stays, number, num_equal, written + tl.sum(stays.to(tl.int32))
