"""Runs a compiled grammar's first steps."""

from __future__ import annotations

import random
import time

import numpy as np

from ...protocols.grammars import Grammar, GrammarMatcher, Vocabulary

STEPS = 4
WALK_STEPS = 24
WALK_SECONDS = 1.0
"""Processor seconds after which a walk ends."""


def probe(grammar: Grammar, vocabulary: Vocabulary) -> float:
    """Return the slowest mask's processor seconds over the first tokens.

    Raises ValueError if no output is possible, or the backend fails.
    """
    matcher = grammar.matcher()
    row = np.empty(-(-vocabulary.size // 32), dtype=np.int32)
    slowest = 0.0
    for step in range(STEPS):
        start = time.thread_time()
        try:
            matcher.fill_bitmask(row)
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        slowest = max(slowest, time.thread_time() - start)
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


def walk(grammar: Grammar, vocabulary: Vocabulary, seed: int = 0) -> float:
    """Accept random allowed tokens; return the slowest mask's processor seconds.

    Finds crashes; an early end is no fault.
    """
    draw = random.Random(seed)
    row = np.empty((1, -(-vocabulary.size // 32)), dtype=np.int32)
    start = time.thread_time()
    slowest = 0.0
    matcher = grammar.matcher()
    for _ in range(WALK_STEPS):
        before = time.thread_time()
        if before - start > WALK_SECONDS:
            break
        try:
            matcher.fill_bitmask(row[0])
            slowest = max(slowest, time.thread_time() - before)
            tokens = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            tokens = np.setdiff1d(tokens, vocabulary.eos_token_ids)
            if not tokens.size or not matcher.accept([int(draw.choice(tokens))]):
                break
        except RuntimeError:
            break
    _fill_together(grammar.matcher(), row)
    return slowest


def _fill_together(matcher: GrammarMatcher, row: np.ndarray) -> None:
    """Fill a mask on the backend's own threads, with their fixed stack size."""
    fill = getattr(type(matcher), "fill_bitmasks", None)
    if fill is not None:
        fill([matcher], row, [0])


def check_mask_time(seconds: float, limit: float) -> None:
    if seconds > limit:
        raise ValueError(
            f"a token's mask takes {seconds:.2f} s of processor time, more than mask_timeout "
            f"({limit} s)"
        )
