"""Memory layout of a slot's sampling settings, as the sampling kernels read them.

A row of settings is 32-bit words; floats are bit-cast. Code that fills such rows must use these
numbers (core/worker/sampling/sampling_columns.py has them too; a test compares them).
"""

from __future__ import annotations

import triton
import triton.language as tl

INVERSE_TEMPERATURE = tl.constexpr(0)
NOISE = tl.constexpr(1)
LOG_MIN_P = tl.constexpr(2)
TOP_P = tl.constexpr(3)
PRESENCE = tl.constexpr(4)
FREQUENCY = tl.constexpr(5)
REPETITION = tl.constexpr(6)
INVERSE_REPETITION = tl.constexpr(7)
TOP_K = tl.constexpr(8)
MIN_TOKENS = tl.constexpr(9)
PROMPT_LEN = tl.constexpr(10)
FLAGS = tl.constexpr(11)
NUM_LOGPROBS = tl.constexpr(12)
RECORD = tl.constexpr(13)
"""Two words: the address of a slot's record, low half first."""
LANES = tl.constexpr(15)

# Bits of FLAGS.
PENALTIES = tl.constexpr(1)
ALLOWED = tl.constexpr(2)
BIAS = tl.constexpr(4)
FILTER = tl.constexpr(8)
LOGPROBS = tl.constexpr(16)
GRAMMAR = tl.constexpr(32)
BANS = tl.constexpr(64)
FORCED = tl.constexpr(128)
IDLE = tl.constexpr(256)
SCALED = tl.constexpr(512)

BIAS_PART = tl.constexpr(1024)
"""Tokens per entry of a record's table of where biases start."""
HEADER = tl.constexpr(4)
"""Words before a record's lists: the numbers of stop ids, of bad words, of tokens in the longest
bad word, and of biases. After them: the stop ids, the bad words (aligned right, padded with -1),
the biased ids (ascending), their biases, and, with biases, the index of the first bias of each
`BIAS_PART` tokens, one entry more than there are parts."""


@triton.jit
def record_of(settings):
    """Return the address of a slot's record."""
    low = tl.load(settings + RECORD).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(settings + RECORD + 1).to(tl.int64)
    return ((high << 32) | low).to(tl.pointer_type(tl.int32))


@triton.jit
def float_of(settings, column):
    return tl.load(settings + column).to(tl.float32, bitcast=True)


@triton.jit
def temperature_factor(settings, skip):
    """Return the factor on logits; 1 if the temperature has been applied already."""
    factor = float_of(settings, INVERSE_TEMPERATURE)
    return tl.where((skip & SCALED) != 0, 1.0, factor)
