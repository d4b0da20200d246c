"""Prompts whose continuation is known: recall of pairs, and copies, among random filler.

A prompt is BOS, filler with what must be remembered strewn in, then questions. Every item that a
question asks for stands in the prompt once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BOS, ASK, COPY = 1, 2, 3
KEYS = range(16, 80)
"""Token ids of keys."""
VALUES = range(80, 144)
"""Token ids of values."""
FILLER = range(144, 256)
VOCAB_SIZE = 256
COPIED = 12
"""Tokens of a passage that is to be copied."""


@dataclass(frozen=True)
class Sample:
    """A prompt, and questions about it."""

    context: list[int]
    """BOS, filler, and the facts."""
    questions: list[list[int]]
    """What to append to the context to ask each question."""
    answers: list[list[int]]
    """The tokens that must follow each."""
    depths: list[float]
    """Where the context says each answer: 0 (first token) to 1 (last)."""


def recall(random: np.random.Generator, length: int, pairs: int) -> Sample:
    """Return a context of `length` tokens with `pairs` pairs of key and value, and a question for
    each, in random order."""
    keys = random.permutation(KEYS)[:pairs]
    values = random.permutation(VALUES)[:pairs]
    context = random.choice(FILLER, length)
    context[0] = BOS
    # Places two apart, so that pairs do not overlap.
    places = 1 + 2 * np.sort(random.choice((length - 1) // 2, pairs, replace=False))
    context[places], context[places + 1] = keys, values
    order = random.permutation(pairs)
    return Sample(
        context=context.tolist(),
        questions=[[ASK, int(keys[at])] for at in order],
        answers=[[int(values[at])] for at in order],
        depths=[float(places[at]) / length for at in order],
    )


def copy(random: np.random.Generator, length: int) -> Sample:
    """Return a context with a passage of different keys and values, and the question to go on after
    the first token of it."""
    passage = random.permutation([*KEYS, *VALUES])[:COPIED]
    context = random.choice(FILLER, length)
    context[0] = BOS
    place = int(random.integers(1, length - COPIED))
    context[place : place + COPIED] = passage
    first, *rest = passage.tolist()
    return Sample(context.tolist(), [[COPY, first]], [rest], [place / length])
