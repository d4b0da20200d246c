"""Types of a measurement: its input and its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec

from .engine.backends import Backend
from .roofline import Ceilings, Extent, ModelShape
from .workloads import BenchRequest, Workload

Record: TypeAlias = dict[str, Any]


class Bench(msgspec.Struct, kw_only=True):
    """A started engine, its model, and the rates measured on this device."""

    backend: Backend
    vocab_size: int
    shape: ModelShape
    ceilings: Ceilings | None = None
    repeats: int | None = None
    """Replaces the workload's own."""
    warmup: int | None = None

    def times(self, workload: Workload) -> tuple[int, int]:
        """(warm-ups, repeats)"""
        warmup = workload.warmup if self.warmup is None else self.warmup
        return warmup, max(1, workload.repeats if self.repeats is None else self.repeats)


Measurement: TypeAlias = Callable[[Bench, Workload], Iterator[Record]]
"""Yields results as they are ready: `measured`, and `floor` if the device's rates are known. A
result that a later one of the same workload replaces has `partial`."""


def extents(requests: Sequence[BenchRequest], cached: Sequence[int] | None = None) -> list[Extent]:
    """Return the sizes of requests, for the floors."""
    num_cached = cached or [0] * len(requests)
    return [
        Extent(len(request.prompt), request.output, count)
        for request, count in zip(requests, num_cached, strict=True)
    ]


def rounded(measured: Record) -> Record:
    """Round to six significant digits."""
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in measured.items()
    }
