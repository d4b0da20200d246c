"""The benchmark of restored prefixes, at a size for a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jackfield

SCRIPT = Path(jackfield.__file__).resolve().parent / "examples/benchmarks/kv_restore.py"


def test_it_restores_the_whole_prefix_and_records_it(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    completed = subprocess.run(
        [sys.executable, str(SCRIPT), "--tokens", "200", "--rounds", "1", "--offload-gib", "0.05",
         "--device", "cpu", "--output", str(output)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    (line,) = output.read_text().splitlines()
    record = json.loads(line)
    assert record["workload"] == "kv_restore" and record["at"]["tokens"] == 200
    measured = record["measured"]
    assert measured["same_tokens"] == 1.0
    assert measured["restored_bytes"] == 192 // 16 * (16 * 18432 // 4)
    assert measured["restore_s"] > 0 and measured["recompute_s"] > 0
