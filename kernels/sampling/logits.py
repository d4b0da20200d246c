"""A slot's edits of logits, as the sampling kernels apply them, and the order of logits.

Each kernel recomputes them, bitwise equal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gumbel_noise import LOG2E
from .layout import (
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

_FINE = tl.constexpr(1099511627776.0)


@triton.jit
def _biased(x, token, first, settings, vocab_size, SIZE: tl.constexpr):
    """Add the slot's biases within `first` .. `first + SIZE`, which BIAS_PART divides."""
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
    """Return -inf where a token's bit is off; NaN stays, as it marks the row as invalid."""
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
    """Return float32 logits of the tokens from `first` on with biases, masks and penalties."""
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
    """Return floor(2^40 exp(x - highest)), int64."""
    return (tl.exp2((x - highest) * LOG2E) * _FINE).to(tl.int64)


@triton.jit
def ordered(x):
    """Return float32 numbers as integers of the same order; -0 and +0 are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def places(x, token):
    """Return the order of (logit, then lower id) as one integer: larger comes first."""
    return (ordered(x).to(tl.int64) << 20) | (0xFFFFF - token).to(tl.int64)
