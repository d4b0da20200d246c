"""What an engine does for the first time, such as compiling a kernel, is in no measured time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from jackfield.entrypoints.bench.engine.session import IN_PROCESS, _measurement
from jackfield.entrypoints.bench.roofline import ModelShape
from jackfield.entrypoints.bench.types import Bench, Outcome
from jackfield.entrypoints.bench.workloads import (
    ARCHITECTURES,
    WORKLOADS,
    BenchRequest,
    Workload,
)

MEASURED = [x.id for x in WORKLOADS.values() if x.kind in IN_PROCESS and x.kind != "minute"]
"""`first-minute` measures just that."""
SLOW = 1000.0


class CompilesLate:
    """Each set of lengths takes SLOW seconds once, and then one second per step."""

    version, details = "", {}

    def __init__(self) -> None:
        self.seen = set[tuple[tuple[int, int], ...]]()

    def run(self, requests: Sequence[BenchRequest]) -> Outcome:
        lengths = tuple((len(request.prompt), request.output) for request in requests)
        steps = max(request.output for request in requests)
        seconds = steps if lengths in self.seen else SLOW
        self.seen.add(lengths)
        return Outcome(float(seconds), [[0] * request.output for request in requests], 0)

    def forget(self) -> None:
        pass

    def close(self) -> None:
        pass


def seconds_of(workload: Workload, warmup: int | None = None) -> list[float]:
    """All times of the workload's records."""
    bench = Bench(
        backend=CompilesLate(), vocab_size=300, warmup=warmup,
        shape=ModelShape.from_config(ARCHITECTURES["Qwen3-0.6B"], weight_bytes=2, kv_bytes=2),
    )  # fmt: skip
    times: list[float] = []
    for record in _measurement(workload)(bench, workload):
        measured: dict[str, Any] = record["measured"]
        times += [value for name, value in measured.items() if name.endswith("seconds")]
        times += [value / 1e3 for name, value in measured.items() if "first_token" in name]
        times += [x for values in record.get("repeats", {}).values() for x in values]
    return times


@pytest.mark.parametrize("name", MEASURED)
def test_a_workload_is_run_once_before_it_is_measured(name: str) -> None:
    workload = WORKLOADS[name].scaled(0.02)
    assert 0 < max(seconds_of(workload)) < SLOW / 2 <= max(seconds_of(workload, warmup=0))
