"""What sampling kernels make of logits on the way: edits that a slot asks for, and the few numbers
that say where its limits are. Each kernel makes them anew, with the same result to the last bit."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from .sampling_layout import (
    ALLOWED,
    BIAS,
    BIAS_PART,
    FREQUENCY,
    GRAMMAR,
    HEADER,
    INVERSE_REPETITION,
    PENALTIES,
    PRESENCE,
    REPETITION,
    float_of,
    record_of,
)
from .sampling_noise import LOG2E

_FINE = tl.constexpr(1099511627776.0)
_LOWEST = tl.constexpr(-(1 << 62))


@triton.jit
def _biased(x, token, first, settings, vocab_size, SIZE: tl.constexpr):
    """Plus the slot's biases within `first` .. `first + SIZE`, which BIAS_PART divides."""
    record = record_of(settings)
    num_biases = tl.load(record + 3)
    ids = record + HEADER + tl.load(record) + tl.load(record + 1) * tl.load(record + 2)
    starts = ids + 2 * num_biases
    parts = tl.cdiv(vocab_size, BIAS_PART)
    begin = tl.load(starts + first // BIAS_PART)
    end = tl.load(starts + tl.minimum((first + SIZE) // BIAS_PART, parts))
    for index in range(begin, end):
        bias = tl.load(ids + num_biases + index).to(tl.float32, bitcast=True)
        x = tl.where(token == tl.load(ids + index), x + bias, x)
    return x


@triton.jit
def _masked(x, words, token, inside):
    """-inf where a token's bit is off; NaN stays, for it says that the row is broken."""
    word = tl.load(words + (token >> 5), mask=inside, other=0)
    off = ((word >> (token & 31)) & 1) == 0
    return tl.where(off & (x == x), -float("inf"), x)


@triton.jit
def edited(
    x,
    token,
    first,
    inside,
    row64,
    slot,
    flags,
    settings,
    counts_ptr,
    allowed_ptr,
    grammar_ptr,
    grammar_rows_ptr,
    stride_counts,
    stride_allowed,
    stride_grammar,
    vocab_size,
    SIZE: tl.constexpr,
):
    """Float32 logits of the tokens from `first` on → with biases, masks and penalties."""
    if (flags & (BIAS | ALLOWED | GRAMMAR | PENALTIES)) != 0:
        if (flags & BIAS) != 0:
            x = _biased(x, token, first, settings, vocab_size, SIZE)
        if (flags & ALLOWED) != 0:
            x = _masked(x, allowed_ptr + slot * stride_allowed, token, inside)
        if (flags & GRAMMAR) != 0:
            bits = tl.load(grammar_rows_ptr + row64)
            if bits >= 0:
                x = _masked(x, grammar_ptr + bits * stride_grammar, token, inside)
        if (flags & PENALTIES) != 0:
            known = tl.load(counts_ptr + slot * stride_counts + token, mask=inside, other=0)
            times = (known & 0x7FFF).to(tl.float32)
            repetition = float_of(settings, REPETITION)
            factor = tl.where(x > 0, float_of(settings, INVERSE_REPETITION), repetition)
            x = tl.where(known != 0, x * factor, x)
            x = x - times * float_of(settings, FREQUENCY)
            x = x - tl.where(times > 0, float_of(settings, PRESENCE), 0.0)
    return x


@triton.jit
def token_mass(x, highest):
    """floor(2^40 exp(x - highest)), int64"""
    return (tl.exp2((x - highest) * LOG2E) * _FINE).to(tl.int64)


@triton.jit
def row_bounds(best_ptr, row64, num_parts, BLOCK: tl.constexpr):
    """→ a row's largest logit, +inf where one is not a number; a step for pivots below it.

    The step is half the distance to the mean of the parts' largest: some 0.6 deviations where
    logits are normal, whatever their scale, and some logits where few stand out.
    """
    part = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row64 * num_parts + part, mask=part < num_parts, other=-float("inf"))
    highest = tl.max(best, axis=0)
    finite = (best > -float("inf")) & (best < float("inf"))
    count = tl.sum(finite.to(tl.float32), axis=0)
    below = tl.sum(tl.where(finite, highest - best, 0.0), axis=0)
    return highest, tl.maximum(0.5 * below / tl.maximum(count, 1.0), 0.001)


@triton.jit
def enough_likely(raw_ptr, row64, num_parts, num, BLOCK: tl.constexpr):
    """A bound at or above which there are `num` tokens at least: of the parts' largest logits the
    one of that rank; -inf where there are fewer parts.

    Some tokens more than wanted, so that the chosen one is mostly among them, too.
    """
    part = tl.arange(0, BLOCK)
    inside = part < num_parts
    top = tl.load(raw_ptr + (row64 * num_parts + part) * 2, mask=inside, other=-float("inf"))
    wanted = tl.maximum(num, 8)
    found = tl.full((), 0, tl.int32)
    bound = tl.full((), float("inf"), tl.float32)
    for _ in range(0, tl.minimum(wanted, num_parts)):
        best = tl.max(tl.where(top < bound, top, -float("inf")), axis=0)
        bound = tl.where(found < wanted, best, bound)
        found = tl.sum((inside & (top >= bound)).to(tl.int32), axis=0)
    return tl.where(found < wanted, -float("inf"), bound)


@triton.jit
def ordered(x):
    """Float32 as integers of the same order; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def places(x, token):
    """Order of (logit, then lower id) as one integer: larger comes first."""
    return (ordered(x).to(tl.int64) << 20) | (0xFFFFF - token).to(tl.int64)
