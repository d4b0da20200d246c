"""A slot's row of sampling settings: 32-bit words, floats bit-cast."""

from __future__ import annotations

import enum

from .gumbel import NUM_LANES


class Column(enum.IntEnum):
    INVERSE_TEMPERATURE = 0
    """float; 1 for greedy rows"""
    NOISE = 1
    """float; weight of the Gumbel noise: 0 for greedy rows, else 1"""
    LOG_MIN_P = 2
    """float; -inf: off"""
    TOP_P = 3
    """float; 2: off"""
    PRESENCE = 4
    """float"""
    FREQUENCY = 5
    """float"""
    REPETITION = 6
    """float"""
    INVERSE_REPETITION = 7
    """float"""
    TOP_K = 8
    """int; vocab_size: off"""
    MIN_TOKENS = 9
    """int"""
    PROMPT_LEN = 10
    """int"""
    FLAGS = 11
    """int: `Flag`"""
    NUM_LOGPROBS = 12
    """int"""
    RECORD = 13
    """int, two words: address of the slot's lists, low half first (`lists_record`)"""
    LANES = 15
    """int; NUM_LANES of them, the seed"""


NUM_COLUMNS = Column.LANES + NUM_LANES


class Flag(enum.IntFlag):
    """A slot's required work; none: greedy, or only a temperature."""

    PENALTIES = 1
    """`counts` is used."""
    ALLOWED = 2
    """Only tokens set in `allowed` may come next."""
    BIAS = 4
    """logit_bias, in the slot's record"""
    FILTER = 8
    """Random sampling with top_k, top_p or min_p."""
    LOGPROBS = 16
    """NUM_LOGPROBS top tokens, and the chosen one's log-probability."""
    GRAMMAR = 32
    """A mask may come with the step."""
    BANS = 64
    """`allowed` depends on the output: bad words, or stop ids before min_tokens."""
    FORCED = 128
    """A given token is scored."""
    IDLE = 256
    """Padding."""
    SCALED = 512
    """Logits are already divided by the temperature."""
    WIDE = 1 << 16
    """More top tokens than kernels return. Host only."""
    PROCESSED = 1 << 17
    """A processor serves the slot. Host only."""


MOST_TOP_TOKENS = 20
"""Most top tokens returned by kernels."""

EDITS = Flag.PENALTIES | Flag.ALLOWED | Flag.BIAS | Flag.GRAMMAR
"""Flags that change logits before the temperature."""
