"""Which known name a mistyped one was meant to be, for "did you mean …?" in errors."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable

LEFT_OUT = 10
"""More than the slips that any name may have."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that differs by a slip of the keyboard or by words left out; None without
    one.

    A name that only resembles another means something else (`--nnodes` is not `--model`), so
    resemblance alone gives no hint.
    """
    words = _words(name)
    costs: dict[int, list[str]] = {}
    for other in names:
        if (cost := _cost(words, _words(other))) is not None:
            costs.setdefault(cost, []).append(other)
    if not costs:
        return None
    cheapest = costs[min(costs)]
    return min(cheapest) if min(costs) < LEFT_OUT or len(cheapest) == 1 else None


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_.\s]+", name.lower()) if word]


def _cost(words: list[str], others: list[str]) -> int | None:
    """Return the number of slips, or LEFT_OUT and the number of words left out; None if the names
    are too different."""
    if len(words) == len(others):
        slips = [_distance(*pair) for pair in zip(words, others, strict=True)]
        allowed = [_allowed(word) for word in words]
        if len(words) == 1 and len(words[0]) == len(others[0]) < 4:
            return None  # Of so short a word another letter makes another word.
        if all(map(operator.le, slips, allowed)) and sum(slips) <= _allowed("".join(words)):
            return sum(slips)
    elif "".join(words) == "".join(others):
        return 1
    return LEFT_OUT + len(others) - len(words) if _abbreviates(words, others) else None


def _allowed(word: str) -> int:
    """Return how many slips a word of this length may have."""
    return 1 if len(word) < 8 else 2


def _abbreviates(words: list[str], others: list[str]) -> bool:
    """Return whether each given word is one of the known words, in order, or four or more letters
    that one begins with: max-len of max-model-len. A single word abbreviates only a single one."""
    if len(words) == 1 < len(others):
        return False
    rest = iter(others)
    return all(
        any(other == word or (len(word) >= 4 and other.startswith(word)) for other in rest)
        for word in words
    )


def _distance(one: str, other: str) -> int:
    """Return the number of letters to insert, remove, replace or swap with a neighbour."""
    if abs(len(one) - len(other)) > 2:
        return 3
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, above, row = row, before, [i]
        for j, character in enumerate(other, 1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != character))
            swapped = i > 1 and j > 1 and (letter, one[i - 2]) == (other[j - 2], character)
            row.append(min(best, above[j - 2] + 1) if swapped else best)
    return row[-1]
