"""What every measurement is given, and what it yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec

from .backends import Backend
from .roofline import Ceilings, Extent, ModelShape
from .workloads import Ask, Workload

Record: TypeAlias = dict[str, Any]


class Bench(msgspec.Struct, kw_only=True):
    """A started engine, the model in it, and what this card could do."""

    backend: Backend
    vocab_size: int
    shape: ModelShape
    ceilings: Ceilings | None = None
    repeats: int | None = None
    """Instead of the workload's own."""
    warmup: int | None = None

    def times(self, workload: Workload) -> tuple[int, int]:
        """(warm-ups, repeats)"""
        warmup = workload.warmup if self.warmup is None else self.warmup
        return warmup, max(1, workload.repeats if self.repeats is None else self.repeats)


Measurement: TypeAlias = Callable[[Bench, Workload], Iterator[Record]]
"""Yields results as they come: `measured`, and `floor` where the card is known. One that is
superseded by a later one of the same workload says `partial`."""


def extents(asks: Sequence[Ask], cached: Sequence[int] | None = None) -> list[Extent]:
    """The sizes of requests, for the floors."""
    known = cached or [0] * len(asks)
    return [
        Extent(len(ask.prompt), ask.output, held) for ask, held in zip(asks, known, strict=True)
    ]


def rounded(measured: Record) -> Record:
    """Six significant digits: more is noise."""
    return {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in measured.items()
    }
