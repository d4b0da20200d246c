"""Advances and masks all constrained rows of a step, in one backend call where possible."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .constraint import Constraint, mask_ends

logger = logging.getLogger("jackfield.structured")


def batch_method(constraints: Sequence[Constraint], name: str) -> Callable[..., Any] | None:
    """Return the backend's batch method of this name.

    None if missing, for several backends, or a single matcher.
    """
    if len(constraints) < 2:
        return None
    kinds = {type(constraint.matcher) for constraint in constraints}
    return getattr(kinds.pop(), name, None) if len(kinds) == 1 else None


def advance_all(constraints: Sequence[Constraint], token_ids: Sequence[int]) -> None:
    batch: list[Constraint] = []
    batch_ids: list[int] = []
    for constraint, token_id in zip(constraints, token_ids, strict=True):
        if constraint.in_grammar and token_id >= 0:
            batch.append(constraint)
            batch_ids.append(token_id)
        else:
            constraint.advance(token_id)
    accept_each = batch_method(batch, "accept_each")
    if accept_each is None:
        for constraint, token_id in zip(batch, batch_ids, strict=True):
            constraint.advance(token_id)
        return
    try:
        results = accept_each([constraint.matcher for constraint in batch], batch_ids)
    except BaseException as error:  # Unknown which matchers have advanced.
        results = [error] * len(batch)
    for constraint, token_id, result in zip(batch, batch_ids, results, strict=True):
        constraint.record_accept(token_id, result)


def fill_masks(
    fill_bitmasks: Callable[..., Any], constraints: Sequence[Constraint], bits: np.ndarray
) -> None:
    """Write the next tokens' masks with `fill_bitmasks`.

    bits: [len(constraints), words] int32
    """
    rows: list[int] = []
    matchers: list[Any] = []
    for row, constraint in enumerate(constraints):
        matcher = constraint.matcher if constraint.in_grammar else constraint.begin_fill(bits[row])
        if matcher is not None:
            rows.append(row)
            matchers.append(matcher)
    if not rows:  # All requests reason or have ended; backends refuse a call for nothing.
        return
    try:
        errors = fill_bitmasks(matchers, bits, rows)
    except KeyboardInterrupt:
        raise
    except BaseException:  # Panics of Rust are no `Exception`.
        logger.exception("masks could not be filled together; each is filled by itself")
        for row in rows:
            constraints[row].fill(bits[row])
        return
    rows_by_ends: dict[int, tuple[Constraint, list[int]]] = {}
    for row, error in zip(rows, errors, strict=True):
        constraint = constraints[row]
        if error is not None or not constraint.in_grammar or constraint.lists is not None:
            constraint.finish_fill(bits[row], error)
        elif constraint.masks_ends:
            rows_by_ends.setdefault(id(constraint.ends), (constraint, []))[1].append(row)
    for constraint, same_ends in rows_by_ends.values():
        mask_ends(constraint.ends, bits, same_ends)
    empty = bits.view(np.uint32).max(axis=1) == 0  # `any` is slower.
    for row in np.flatnonzero(empty).tolist():
        constraints[row].fail_empty(bits[row])
