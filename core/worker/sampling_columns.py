"""A slot's row of sampling settings: 32-bit words, floats bit-cast. Kernels read such rows."""

from __future__ import annotations

import enum

from .noise import NUM_LANES


class Column(enum.IntEnum):
    """What each word is."""

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
    """int, two words: the address of the slot's lists, low half first (`lists_record`)"""
    LANES = 15
    """int; NUM_LANES of them, the seed"""


NUM_COLUMNS = Column.LANES + NUM_LANES


class Flag(enum.IntFlag):
    """Work that a slot asks for; without any, its row is greedy or has a temperature."""

    PENALTIES = 1
    """`counts` is read and kept."""
    ALLOWED = 2
    """Only tokens whose bit is on in `allowed` may come next."""
    BIAS = 4
    """logit_bias, in the slot's record"""
    FILTER = 8
    """A row that draws, with top_k, top_p or min_p."""
    LOGPROBS = 16
    """NUM_LOGPROBS top tokens, and the chosen one's log-probability"""
    GRAMMAR = 32
    """A mask may come with the step."""
    BANS = 64
    """`allowed` changes with the output: bad words, or stop ids before min_tokens."""
    FORCED = 128
    """No token is chosen: the one that is given is scored."""
    IDLE = 256
    """Padding: nothing is read or written."""
    SCALED = 512
    """Logits come divided by the temperature."""
    WIDE = 1 << 16
    """More top tokens are asked for than the kernels give: torch makes them. Host only."""
    PROCESSED = 1 << 17
    """A plugged-in processor serves the slot. Host only."""


MOST_TOP_TOKENS = 20
"""Top tokens that the kernels give."""

EDITS = Flag.PENALTIES | Flag.ALLOWED | Flag.BIAS | Flag.GRAMMAR
"""What changes logits before the temperature."""
