"""Bounds on the limit of a filtered row, computed once for the kernels that read its logits.

A row has `LIMITS` float32 numbers, `FOUND` int32 counters and `SUMS` int64 sums. The limit is the
smallest logit of the tokens that top_k and top_p keep.

- top_k up to the number of parts: at least k tokens, and with similar parts not many more, reach
  the k-th largest of the parts' maxima. Those are the candidates.
- top_p, or a larger top_k: counts and mass of the tokens at or above each of `PIVOTS` logits show
  between which two pivots the limit is. If too many tokens are between them, as many closer
  pivots within that interval narrow it.
- min_p alone: all tokens at or above one logit are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .layout import (
    FILTER,
    FLAGS,
    FORCED,
    IDLE,
    LOG_MIN_P,
    LOGPROBS,
    NUM_LOGPROBS,
    TOP_K,
    TOP_P,
    float_of,
)

# Indices of a row's `LIMITS`.
HIGHEST = tl.constexpr(0)
"""The row's largest logit; +inf if one is NaN."""
ORIGIN = tl.constexpr(1)
"""Pivots are below this logit."""
STEP = tl.constexpr(2)
"""Distance between pivots."""
LAST = tl.constexpr(3)
"""The last pivot: every token that may still be kept is at or above it."""
LOWER = tl.constexpr(4)
"""Candidates are at or above this logit."""
UPPER = tl.constexpr(5)
"""Candidates are below this logit; tokens at or above it are certainly kept."""
FLOOR = tl.constexpr(6)
"""Tokens below this logit are ignored."""
LIKELY_FLOOR = tl.constexpr(7)
"""A bound on unedited logits that enough tokens reach for the requested log-probabilities."""
LIMITS = tl.constexpr(8)

# Indices of a row's `FOUND`.
NEAR = tl.constexpr(0)
"""Number of candidates."""
LIKELY = tl.constexpr(1)
"""Number of tokens that may be among the top ones."""
STAGE = tl.constexpr(2)
"""1: the row needs pivots; 2: also closer ones."""
ARRIVED = tl.constexpr(3)
"""Number of programs that have finished their part of the row."""
SLOT = tl.constexpr(4)
"""The row's slot."""
ASKED = tl.constexpr(5)
"""The row's flags, so that kernels need not load the slot first."""
FOUND = tl.constexpr(8)

# Indices of a row's `SUMS`: number and mass of the tokens that count, number and mass of those that
# are certainly kept; then those at or above each pivot, of the first pivots and of the closer ones.
PIVOT_SUMS = tl.constexpr(4)
PIVOTS = 16
SUMS = tl.constexpr(4 + 4 * 16)
_SUMS_BLOCK = tl.constexpr(128)


@triton.jit
def _reached_by(values, stride, count, wanted, BLOCK: tl.constexpr):
    """Return the largest number that at least `wanted` of the `count` numbers reach; -inf if
    none.
    """
    index = tl.arange(0, BLOCK)
    line, column = index[None, :], index[:, None]
    others = tl.load(values + line * stride, mask=line < count, other=-float("inf"))
    each = tl.load(values + column * stride, mask=column < count, other=-float("inf"))
    reaching = tl.sum((others >= each).to(tl.int32), axis=1)
    own = tl.load(values + index * stride, mask=index < count, other=-float("inf"))
    bound = tl.max(tl.where((reaching >= wanted) & (index < count), own, -float("inf")), axis=0)
    return tl.where(wanted > count, -float("inf"), bound)


@triton.jit(do_not_specialize=["num_rows", "skip"], do_not_specialize_on_alignment=["slots_ptr"])
def limits_kernel(
    settings_ptr,
    slots_ptr,
    best_ptr,
    raw_ptr,
    limits_ptr,
    found_ptr,
    sums_ptr,
    listed_ptr,
    stride_settings,
    num_rows,
    vocab_size,
    num_parts,
    skip,
    BLOCK: tl.constexpr,
):
    """One program per row. Lists the rows that need pivots, and those that need gathering."""
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    slot = tl.load(slots_ptr + row64)
    settings = settings_ptr + slot * stride_settings
    flags = tl.load(settings + FLAGS) & ~skip
    limits, found = limits_ptr + row64 * LIMITS, found_ptr + row64 * FOUND
    filtered = ((flags & FILTER) != 0) & ((flags & FORCED) == 0)
    scored = (flags & LOGPROBS) != 0
    if ((flags & IDLE) == 0) & (filtered | scored):
        tl.store(found + NEAR, 0)
        tl.store(found + LIKELY, 0)
        tl.store(found + ARRIVED, 0)
        tl.store(found + SLOT, slot.to(tl.int32))
        tl.store(found + ASKED, flags)
        to = tl.atomic_add(listed_ptr + 1, 1)
        tl.store(listed_ptr + 2 + num_rows + to, row)
        if scored:
            # A few more than requested, so that the chosen token is usually among them, too.
            num = tl.maximum(tl.load(settings + NUM_LOGPROBS), 8)
            tops = raw_ptr + row64 * num_parts * 2
            tl.store(limits + LIKELY_FLOOR, _reached_by(tops, 2, num_parts, num, BLOCK))
        if filtered:
            index = tl.arange(0, _SUMS_BLOCK)
            zero = tl.zeros((_SUMS_BLOCK,), tl.int64)
            tl.store(sums_ptr + row64 * SUMS + index, zero, mask=index < SUMS)
            part = tl.arange(0, BLOCK)
            parts = best_ptr + row64 * num_parts
            best = tl.load(parts + part, mask=part < num_parts, other=-float("inf"))
            highest = tl.max(best, axis=0)
            # Half the distance to the mean of the parts' maxima: about 0.6 deviations for normally
            # distributed logits of any scale, and several units if a few logits stand out.
            finite = (best > -float("inf")) & (best < float("inf"))
            count = tl.sum(finite.to(tl.float32), axis=0)
            below = tl.sum(tl.where(finite, highest - best, 0.0), axis=0)
            step = tl.maximum(0.5 * below / tl.maximum(count, 1.0), 0.001)
            bad = (highest == float("inf")) | (highest == -float("inf"))
            floor = highest + float_of(settings, LOG_MIN_P)
            top_k = tl.load(settings + TOP_K)
            lower = tl.full((), -float("inf"), tl.float32)
            upper = tl.full((), -float("inf"), tl.float32)
            stage = tl.full((), 0, tl.int32)
            if bad:
                floor = tl.full((), float("inf"), tl.float32)
            else:
                if (top_k < vocab_size) | (float_of(settings, TOP_P) < 1.0):
                    bound = _reached_by(parts, 1, num_parts, top_k, BLOCK)
                    if bound > -float("inf"):
                        lower = bound
                        upper = tl.full((), float("inf"), tl.float32)
                        floor = tl.maximum(floor, bound)
                    else:
                        stage = tl.full((), 1, tl.int32)
                        to = tl.atomic_add(listed_ptr, 1)
                        tl.store(listed_ptr + 2 + to, row)
            tl.store(found + STAGE, stage)
            tl.store(limits + HIGHEST, highest)
            tl.store(limits + ORIGIN, highest)
            tl.store(limits + STEP, step)
            tl.store(limits + LAST, lower)
            tl.store(limits + LOWER, lower)
            tl.store(limits + UPPER, upper)
            tl.store(limits + FLOOR, floor)


@triton.jit
def _first_reached(counts, masses, by_count, target, COUNT: tl.constexpr):
    """Return the index of the first pivot with enough at or above it, the number of tokens at or
    above it, and the number at or above the pivot before it."""
    index = tl.arange(0, COUNT)
    amounts = tl.where(by_count, counts, masses)
    first = tl.min(tl.where(amounts >= target, index, COUNT - 1), axis=0)
    held = tl.max(tl.where(index == first, counts, 0), axis=0)
    above = tl.max(tl.where(index == first - 1, counts, 0), axis=0)
    return first, held, above


@triton.jit
def narrow(settings, limits, found, sums, closer, COUNT: tl.constexpr, CAPACITY: tl.constexpr):
    """Set LOWER and UPPER from a row's counted pivots, and closer pivots if too many tokens are
    between the two."""
    index = tl.arange(0, COUNT)
    at = sums + PIVOT_SUMS + index
    counts = tl.load(at, cache_modifier=".cg")
    masses = tl.load(at + COUNT, cache_modifier=".cg")
    alive = tl.max(tl.where(index == COUNT - 1, counts, 0), axis=0)
    mass = tl.max(tl.where(index == COUNT - 1, masses, 0), axis=0)
    top_k = tl.load(settings + TOP_K).to(tl.int64)
    top_p = float_of(settings, TOP_P)
    by_count = top_k < alive
    limited = by_count | (top_p < 1.0)
    # With both top_k and top_p, candidates begin at the top: top_p is a share of their mass.
    from_top = by_count & (top_p < 1.0)
    target = tl.where(by_count, top_k, (mass.to(tl.float32) * top_p).to(tl.int64))
    origin, step = tl.load(limits + ORIGIN), tl.load(limits + STEP)
    lower, upper = tl.load(limits + LOWER), tl.load(limits + UPPER)
    if closer == 0:
        first, held, above = _first_reached(counts, masses, by_count, target, COUNT)
        upper = tl.where(first == 0, float("inf"), origin - step * first.to(tl.float32))
        least = origin - step * (first + 1).to(tl.float32)
        lower = tl.where(first == COUNT - 1, -float("inf"), least)
        few = tl.where(from_top, held, held - above) <= CAPACITY
        if limited & (few == 0):
            nearest = tl.minimum(upper, origin)
            unbound = lower == -float("inf")
            tl.store(limits + ORIGIN, nearest)
            tl.store(
                limits + STEP, tl.where(unbound, 2.0 * step, (nearest - lower) * (1.0 / COUNT))
            )
            tl.store(limits + LAST, lower)
            tl.store(found + STAGE, 2)
    else:
        counts = tl.load(at + 2 * COUNT, cache_modifier=".cg")
        masses = tl.load(at + 3 * COUNT, cache_modifier=".cg")
        nearer, _, _ = _first_reached(counts, masses, by_count, target, COUNT)
        upper = tl.where(nearer > 0, origin - step * nearer.to(tl.float32), upper)
        least = origin - step * (nearer + 1).to(tl.float32)
        lower = tl.where(nearer < COUNT - 1, least, lower)
    lower = tl.where(limited, lower, -float("inf"))
    upper = tl.where(from_top, float("inf"), tl.where(limited, upper, -float("inf")))
    tl.store(limits + LOWER, lower)
    tl.store(limits + UPPER, upper)
    # Without an effective top_k, top_p is a share of all tokens that min_p keeps.
    floor = tl.load(limits + HIGHEST) + float_of(settings, LOG_MIN_P)
    whole = (by_count == 0) & (top_p < 1.0)
    tl.store(limits + FLOOR, tl.where(whole, floor, tl.maximum(floor, lower)))
