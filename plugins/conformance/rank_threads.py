"""Ranks as threads of one process, which really add and join what each computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from ...core.parallel.ranks import Ranks

SECONDS = 60.0
"""Longest wait for the other ranks; a rank that misses a call fails instead of hanging."""
Result = TypeVar("Result")


class ThreadGroup:
    """One thread's view of the group."""

    def __init__(self, rank: int, parts: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(parts)
        self._parts, self._barrier = parts, barrier

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, by rank."""
        self._parts[self.rank] = x.clone()
        self._barrier.wait(SECONDS)
        parts = list(self._parts)
        self._barrier.wait(SECONDS)
        shapes = {(part.shape, part.dtype) for part in parts}
        assert len(shapes) == 1, f"ranks call with unlike tensors: {shapes}"
        return parts

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum, in the order of ranks, plus the residual; `x` is destroyed, as a real
        group may do."""
        parts = self._exchange(x)
        x.fill_(float("nan") if x.is_floating_point() else -1)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total if residual is None else residual.add_(total)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, joined in the last dimension."""
        return torch.cat(self._exchange(x), dim=-1)


def thread_ranks(size: int) -> list[Ranks]:
    """Return the ranks of one group."""
    parts: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    return [Ranks(tensor=ThreadGroup(rank, parts, barrier)).pausable() for rank in range(size)]


def run_ranks(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Call each function in a thread of its own, all at once, and return their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result() for future in futures]
