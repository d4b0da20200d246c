"""Timing of device work: CUDA events on a GPU, else the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch


def median_seconds(
    work: Callable[[], object], device: torch.device, *, repeats: int = 20, warmup: int = 3
) -> float:
    """Return the median time of `work`."""
    for _ in range(warmup):
        work()
    if device.type != "cuda":
        return statistics.median(_clocked(work) for _ in range(repeats))
    pairs = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize(device)
    return statistics.median(float(begin.elapsed_time(end)) / 1e3 for begin, end in pairs)


def _clocked(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def graph_seconds(
    works: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    repeats: int = 20,
    warmup: int = 3,
) -> float:
    """Return the median time of one of `works`, run in sequence in a CUDA graph.

    Their results stay alive, so that each has its own memory.
    """
    results = [work() for work in works]
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results += [work() for work in works]
    seconds = median_seconds(graph.replay, device, repeats=repeats, warmup=warmup)
    del results
    return seconds / len(works)
