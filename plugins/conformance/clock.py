"""Bars on processor time that hold on a slow or busy machine, too: ratios within one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import inf

USUAL_SECONDS = 0.018
"""What `_little_work` took on an idle core of the machine that the bars were set on."""
_MAX_SPAN = 1.0
"""Processor seconds that the pace is measured over, at most."""


def growth(
    small: Callable[[], object], large: Callable[[], object], bar: float, attempts: int = 4
) -> float:
    """How many times as much processor time `large` takes as `small`, at its best: the least of
    some attempts, none after `bar` is met.

    An attempt measures the two next to each other, so that what else goes on meets both.
    """
    best = inf
    for _ in range(attempts):
        least = max(min(_seconds(small), _seconds(small)), 1e-6)
        best = min(best, _seconds(large) / least)
        if best < bar:
            break
    return best


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def processor_seconds(work: Callable[[], object], bar: float, attempts: int = 6) -> float:
    """Seconds that `work` takes an idle core: the least of some attempts, none after `bar` is met.

    An attempt that misses the bar is compared with plain Python that runs next to it, for about as
    long: where that is slower than usual, because others share the core or its caches, the
    attempt's seconds count as that much less.
    """
    best = inf
    for _ in range(attempts):
        took = _seconds(work)
        best = min(best, took if took < bar else took / max(1.0, _pace(took)))
        if best < bar:
            break
    return best


def _pace(span: float) -> float:
    """How many times as long as usual a little work of generators and texts takes now, on average
    over `span` processor seconds.
    """
    taken, count = 0.0, 0
    while taken < min(span, _MAX_SPAN):
        taken += _little_work()
        count += 1
    return taken / count / USUAL_SECONDS


def _little_work() -> float:
    """→ processor seconds"""

    def letters(count: int) -> Iterator[str]:
        for number in range(count):
            yield "ab"[number & 1]

    began = time.process_time()
    found: dict[str, list[str]] = {"a": [], "b": []}
    for letter in letters(100_000):
        found[letter].append(letter + letter)
    "".join(found["a"])
    return time.process_time() - began
