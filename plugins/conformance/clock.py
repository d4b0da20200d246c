"""Bars on processor time that hold on a slow or busy machine, too: ratios within one run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from math import inf

USUAL_SECONDS = 0.018
"""Seconds of `_little_work` on an idle core of the machine on which the bars were set."""
_MAX_SPAN = 1.0
"""Most processor seconds over which the pace is measured."""
GROWTH_ATTEMPTS = 4
"""Most attempts of `growth`, each of which runs `small` twice."""
_HOPELESS = 2.0
"""Two attempts that miss the bar by this factor suffice."""


def growth(
    small: Callable[[], object],
    large: Callable[[], object],
    bar: float,
    attempts: int = GROWTH_ATTEMPTS,
) -> float:
    """Return the ratio of the processor times of `large` and `small`: the minimum of several
    attempts, the last being the first one that meets `bar`, or the second if both are far from it.

    An attempt measures the two next to each other, so that other load affects both.
    """
    best = inf
    for attempt in range(attempts):
        least = max(min(_seconds(small), _seconds(small)), 1e-6)
        best = min(best, _seconds(large) / least)
        if best < bar or (attempt and best > _HOPELESS * bar):
            break
    return best


def _seconds(work: Callable[[], object]) -> float:
    """Return the processor seconds of this thread, without a collection of garbage, which goes
    through what earlier tests left, too."""
    collects = gc.isenabled()
    gc.disable()
    try:
        start = time.thread_time()
        work()
        return time.thread_time() - start
    finally:
        if collects:
            gc.enable()


def processor_seconds(work: Callable[[], object], bar: float, attempts: int = 6) -> float:
    """Return the seconds that `work` takes on an idle core: the minimum of several attempts, the
    last being the first one that meets `bar`, or the second if both are far from it.

    An attempt that misses the bar is compared with plain Python that runs next to it, for about as
    long: if that is slower than usual, because others share the core or its caches, the attempt's
    seconds are scaled down by the same factor.
    """
    best = inf
    for attempt in range(attempts):
        took = _seconds(work)
        best = min(best, took if took < bar else took / max(1.0, _pace(took)))
        if best < bar or (attempt and best > _HOPELESS * bar):
            break
    return best


def _pace(span: float) -> float:
    """Return the current slowdown of a little work on generators and texts, over `span` processor
    seconds.
    """
    seconds, count = 0.0, 0
    while seconds < min(span, _MAX_SPAN):
        seconds += _little_work()
        count += 1
    return seconds / count / USUAL_SECONDS


def _little_work() -> float:
    def letters(count: int) -> Iterator[str]:
        for number in range(count):
            yield "ab"[number & 1]

    start = time.process_time()
    groups: dict[str, list[str]] = {"a": [], "b": []}
    for letter in letters(100_000):
        groups[letter].append(letter + letter)
    "".join(groups["a"])
    return time.process_time() - start
