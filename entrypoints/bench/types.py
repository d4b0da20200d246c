"""Types of a measurement: its input and its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from .roofline import Ceilings, Extent, ModelShape
from .workloads import BenchRequest, Workload

Record: TypeAlias = dict[str, Any]


class Outcome(NamedTuple):
    seconds: float
    token_ids: list[list[int]]
    cached_tokens: int
    """Prompt tokens found in a prefix cache."""


class Backend(Protocol):
    version: str
    details: dict[str, Any]
    """Device, attention backend, KV blocks."""

    def run(self, requests: Sequence[BenchRequest]) -> Outcome:
        """Run all requests at once, to their end."""

    def forget(self) -> None:
        """Clear the prefix cache."""

    def close(self) -> None:
        """Free the device."""


class Bench(msgspec.Struct, kw_only=True):
    """A started engine, its model, and the device's rates."""

    backend: Backend
    vocab_size: int
    shape: ModelShape
    ceilings: Ceilings | None = None
    repeats: int | None = None
    warmup: int | None = None

    def times(self, workload: Workload) -> tuple[int, int]:
        """(warm-ups, repeats)"""
        warmup = workload.warmup if self.warmup is None else self.warmup
        return warmup, max(1, workload.repeats if self.repeats is None else self.repeats)


Measurement: TypeAlias = Callable[[Bench, Workload], Iterator[Record]]
"""Yields results as they are ready: `measured`, and `floor` with known device rates. `partial`: a
later result replaces it."""


def extents(requests: Sequence[BenchRequest], cached: Sequence[int] | None = None) -> list[Extent]:
    num_cached = cached or [0] * len(requests)
    return [
        Extent(len(request.prompt), request.output, count)
        for request, count in zip(requests, num_cached, strict=True)
    ]


def rounded(measured: Record) -> Record:
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in measured.items()
    }
