"""How much of a request's cache stays when it is compacted."""

from __future__ import annotations

import math

MIN_KEPT = 16
"""Fewest tokens that stay: below this, even the first and the last tokens would be dropped."""


def kept_tokens(num_tokens: int, ratio: float) -> int:
    """Return how many of `num_tokens` cached tokens stay. ratio: 0 (excluded) to 1."""
    return min(num_tokens, max(MIN_KEPT, math.ceil(ratio * num_tokens)))
