"""The timeline of decode steps, at a size for a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import forked
import torch
from programs import benchmark

import jackfield

SCRIPT = Path(jackfield.__file__).resolve().parent / "examples/benchmarks/timeline.py"


def test_it_reports_the_host_cost_of_a_step(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    completed = forked.run(
        [sys.executable, str(SCRIPT), "--rows", "6", "--prompt", "20", "--steps", "10",
         "--device", "cpu", "--streams", "--output", str(output)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    record = json.loads(output.read_text())
    assert record["workload"] == "timeline" and record["at"]["rows"] == 6
    measured = record["measured"]
    parts = [measured[f"{part}_us"] for part in ("plan", "take_in", "outputs", "launch")]
    assert all(part > 0 for part in parts)
    assert sum(parts) < 3e3 * measured["step_ms"]


def test_a_step_is_what_runs_from_its_inputs_to_the_next_ones() -> None:
    """One in the middle, in order of time, without what ran on the host."""

    def event(name: str, start: float, end: float, device: str = "CUDA") -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            device_type=getattr(torch.autograd.DeviceType, device),
            time_range=SimpleNamespace(start=start, end=end),
        )

    timeline = benchmark("timeline")
    inputs = [event("_decode_inputs_kernel", at, at + 2) for at in (30.0, 10.0, 50.0, 70.0)]
    others = [event("head", 14.0, 29.0), event("head", 34.0, 48.5), event("wait", 36, 40, "CPU")]
    listed = timeline.kernels_of_a_step(SimpleNamespace(events=lambda: inputs + others))
    first, last = ["_decode_inputs_kernel", 0.0, 2.0], ["_decode_inputs_kernel", 20.0, 2.0]
    assert listed == [first, ["head", 4.0, 14.5], last]
    assert timeline.kernels_of_a_step(SimpleNamespace(events=lambda: others)) == []
