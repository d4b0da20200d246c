"""Ranks as threads of one process, which really add and join what each computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from ...core.parallel.ranks import OneRank, Pipeline, Ranks

SECONDS = 60.0
"""Longest wait for the other ranks; a rank that misses a call fails instead of hanging."""
Result = TypeVar("Result")


class Arrival:
    """A tensor that another thread sends."""

    def __init__(self, sent: queue.SimpleQueue[torch.Tensor], into: torch.Tensor) -> None:
        self._sent, self._into = sent, into

    def wait(self) -> None:
        """Copy it. Those of one queue are waited for in order."""
        x = self._sent.get(timeout=SECONDS)
        assert (x.shape, x.dtype) == (self._into.shape, self._into.dtype), "another was sent"
        self._into.copy_(x)


class ThreadGroup:
    """One thread's view of the group."""

    def __init__(
        self,
        rank: int,
        parts: list[Any],
        barrier: threading.Barrier,
        links: Mapping[tuple[int, int], queue.SimpleQueue[torch.Tensor]],
    ) -> None:
        """links: tensors that were sent and not received, by sender and receiver."""
        self.rank, self.size = rank, len(parts)
        self._parts, self._barrier, self._links = parts, barrier, links

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
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

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send a copy."""
        self._links[self.rank, to].put(x.clone())

    def receive(self, into: torch.Tensor, source: int) -> Arrival:
        """Return what copies the next tensor once it is there."""
        return Arrival(self._links[source, self.rank], into)


def thread_groups(size: int) -> list[ThreadGroup]:
    """Return the ends of one group, by rank."""
    parts: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    links: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = {
        (one, other): queue.SimpleQueue() for one in range(size) for other in range(size)
    }
    return [ThreadGroup(rank, parts, barrier, links) for rank in range(size)]


def thread_ranks(
    size: int,
    num_stages: int = 1,
    *,
    expert_parallel: bool = False,
    partition: tuple[int, ...] | None = None,
) -> list[Ranks]:
    """Return the ranks of a model in `num_stages` stages of `size` ranks each, by number.
    `expert_parallel`: those of a stage hold experts whole; `partition`: layers of each stage."""
    world = thread_groups(size * num_stages)
    if num_stages == 1:
        return [
            Ranks(tensor=group, experts=group if expert_parallel else OneRank()).pausable()
            for group in world
        ]
    stages = [thread_groups(size) for _ in range(num_stages)]
    tensor = [
        stages[rank // size][rank % size] if size > 1 else OneRank() for rank in range(len(world))
    ]
    return [
        Ranks(
            tensor=own, experts=own if expert_parallel else OneRank(),
            pipeline=Pipeline.of(group, num_stages, partition),
        ).pausable()
        for own, group in zip(tensor, world, strict=True)
    ]  # fmt: skip


def run_ranks(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Call each function in a thread of its own, all at once, and return their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result() for future in futures]
