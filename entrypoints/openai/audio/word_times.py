"""When words are said, by how a decoder attends to what it hears: dynamic time warping, as in
Whisper's published code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

SPACELESS = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages that put no spaces between words."""
BEFORE = "\"'“¡¿([{-"
"""Punctuation that belongs to the word after it."""
BEHIND = "\"'.。,，!！?？:：”)]}、"
ASCII = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
BROKEN = "\ufffd"


@dataclass(frozen=True)
class Word:
    """A word of a recording; times are seconds from its start."""

    word: str
    start: float
    end: float


def starts_of_tokens(weights: np.ndarray, width: int) -> np.ndarray:
    """Return the row at which each token begins.

    weights: [heads, tokens, rows], attention of heads that align; width: of the median filter.
    """
    if not weights.shape[1]:
        return np.zeros(0, dtype=np.int64)
    deviation = weights.std(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        normed = (weights - weights.mean(axis=1, keepdims=True)) / deviation
    matrix = _median_filter(np.nan_to_num(normed), width).mean(axis=0)
    return _first_rows(-matrix.astype(np.float64))


def _median_filter(values: np.ndarray, width: int) -> np.ndarray:
    side = width // 2
    if values.shape[-1] <= side:
        return values
    padded = np.pad(values, ((0, 0), (0, 0), (side, side)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1)
    medians: np.ndarray = np.median(windows, axis=-1)
    return medians


def _first_rows(cost: np.ndarray) -> np.ndarray:
    """Return where the cheapest monotone path through [tokens, rows] enters each token. A diagonal
    is computed at once."""
    tokens, rows = cost.shape
    total = np.full((tokens + 1, rows + 1), np.inf)
    steps = np.full((tokens + 1, rows + 1), 2, dtype=np.int8)
    total[0, 0] = 0.0
    steps[:, 0] = 1
    steps[0, :] = 2
    for diagonal in range(2, tokens + rows + 1):
        token = np.arange(max(1, diagonal - rows), min(tokens, diagonal - 1) + 1)
        row = diagonal - token
        both, up, left = total[token - 1, row - 1], total[token - 1, row], total[token, row - 1]
        step = np.where((both < up) & (both < left), 0, np.where((up < both) & (up < left), 1, 2))
        total[token, row] = cost[token - 1, row - 1] + np.choose(step, [both, up, left])
        steps[token, row] = step
    first = np.zeros(tokens, dtype=np.int64)
    token_at, row_at = tokens, rows
    while token_at > 0:
        if row_at > 0:
            first[token_at - 1] = row_at - 1
        step_at = steps[token_at, row_at]
        token_at -= step_at != 2
        row_at -= step_at != 1
    return first


def words_of(
    token_ids: Sequence[int],
    times: Sequence[tuple[float, float]],
    decode: Callable[[Sequence[int]], str],
    language: str | None,
) -> list[Word]:
    """Return the words of tokens that are said at times (start, end)."""
    groups: list[tuple[str, list[int]]] = []
    for text, numbers in _characters(token_ids, decode):
        joins = groups and not (
            language in SPACELESS or text.startswith(" ") or text.strip() in ASCII
        )
        if joins:
            groups[-1] = (groups[-1][0] + text, [*groups[-1][1], *numbers])
        else:
            groups.append((text, numbers))
    return [
        Word(text.strip(), times[numbers[0]][0], times[numbers[-1]][1])
        for text, numbers in _with_punctuation(groups)
        if text.strip()
    ]


def _characters(
    token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[tuple[str, list[int]]]:
    """Return texts of whole characters, with the numbers of their tokens."""
    whole = decode(token_ids)
    found: list[tuple[str, list[int]]] = []
    numbers: list[int] = []
    done = 0
    for number in range(len(token_ids)):
        numbers.append(number)
        text = decode([token_ids[each] for each in numbers])
        at = text.find(BROKEN)
        if at < 0 or done + at >= len(whole) or whole[done + at] == BROKEN:
            found.append((text, numbers))
            done += len(text)
            numbers = []
    if numbers and found:
        found[-1] = (found[-1][0], [*found[-1][1], *numbers])
    return found


def _with_punctuation(groups: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    """Join punctuation with the words that it belongs to."""
    ahead: list[tuple[str, list[int]]] = []
    for text, numbers in reversed(groups):
        if ahead and text.startswith(" ") and text.strip() in BEFORE:
            ahead[-1] = (text + ahead[-1][0], [*numbers, *ahead[-1][1]])
        else:
            ahead.append((text, numbers))
    joined: list[tuple[str, list[int]]] = []
    for text, numbers in reversed(ahead):
        if joined and not joined[-1][0].endswith(" ") and text in BEHIND:
            joined[-1] = (joined[-1][0] + text, [*joined[-1][1], *numbers])
        else:
            joined.append((text, numbers))
    return joined
