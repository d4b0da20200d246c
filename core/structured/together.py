"""The constraints of a step's rows, all at once: as few steps in Python for a row as it needs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from .constraint import Constraint, hold_back

logger = logging.getLogger("jackfield.structured")


def shared(constraints: Sequence[Constraint], way: str) -> Any:
    """The backend's own way to do something for many rows, if they are all of one that has it."""
    if len(constraints) < 2:
        return None
    kinds = {type(constraint.matcher) for constraint in constraints}
    return getattr(kinds.pop(), way, None) if len(kinds) == 1 else None


def advance(constraints: Sequence[Constraint], token_ids: Sequence[int]) -> None:
    """A token was sampled for each; -1: none could be."""
    steady: list[Constraint] = []
    tokens: list[int] = []
    for constraint, token_id in zip(constraints, token_ids, strict=True):
        if constraint.steady and token_id >= 0:
            steady.append(constraint)
            tokens.append(token_id)
        else:
            constraint.advance(token_id)
    accept = shared(steady, "accept_each")
    if accept is None:
        for constraint, token_id in zip(steady, tokens, strict=True):
            constraint.advance(token_id)
        return
    try:
        answers = accept([constraint.matcher for constraint in steady], tokens)
    except Exception as error:  # Nobody knows who has got his token.
        answers = [error] * len(steady)
    for constraint, token_id, answer in zip(steady, tokens, answers, strict=True):
        constraint.advanced(token_id, answer)


def fill(way: Any, constraints: Sequence[Constraint], bits: np.ndarray) -> None:
    """Write which tokens may come next, by the backend's `fill_bitmasks`.

    bits: [len(constraints), words] int32
    """
    rows: list[int] = []
    matchers: list[Any] = []
    for row, constraint in enumerate(constraints):
        matcher = constraint.matcher if constraint.steady else constraint.open(bits[row])
        if matcher is not None:
            rows.append(row)
            matchers.append(matcher)
    try:
        errors = way(matchers, bits, rows)
    except Exception:
        logger.exception("masks could not be filled together; each is filled by itself")
        for row in rows:
            constraints[row].fill(bits[row])
        return
    ends: dict[int, tuple[Constraint, list[int]]] = {}
    for row, error in zip(rows, errors, strict=True):
        constraint = constraints[row]
        if error is not None or not constraint.steady:
            constraint.close(bits[row], error)
        elif constraint.holds_ends:
            ends.setdefault(id(constraint.ends), (constraint, []))[1].append(row)
    for constraint, alike in ends.values():
        hold_back(constraint.ends, bits, alike)
