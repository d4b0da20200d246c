"""The timeline of decode steps, at a size for a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import forked

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
