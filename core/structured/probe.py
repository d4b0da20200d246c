"""The first steps of an output through a grammar that has just been compiled."""

from __future__ import annotations

import time

import numpy as np

from ..protocols import Grammar, Vocabulary

STEPS = 4


def probe(grammar: Grammar, vocabulary: Vocabulary) -> float:
    """→ seconds of the slowest mask.

    Raises ValueError when no output is possible, or the backend gives up within a few tokens:
    better now than in the middle of an answer.
    """
    matcher = grammar.matcher()
    row = np.empty(-(-vocabulary.size // 32), dtype=np.int32)
    slowest = 0.0
    for step in range(STEPS):
        began = time.perf_counter()
        try:
            matcher.fill_bitmask(row)
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        slowest = max(slowest, time.perf_counter() - began)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: vocabulary.size]
        if not bits.any():
            raise ValueError("it allows no output" if step == 0 else "it leads to a dead end")
        bits[list(vocabulary.eos_token_ids)] = 0
        if not bits.any():
            break
        try:
            accepted = matcher.accept([int(bits.argmax())])
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        if not accepted:
            raise ValueError("it does not accept what it allows")
    return slowest


def check_mask_time(seconds: float, limit: float) -> None:
    """Raises ValueError past the limit."""
    if seconds > limit:
        raise ValueError(
            f"a token's mask takes {seconds:.2f} s, more than mask_timeout ({limit} s)"
        )
