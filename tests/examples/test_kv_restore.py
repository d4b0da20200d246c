"""The benchmark of restored prefixes, at a size for a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import run_program

import jackfield

SCRIPT = Path(jackfield.__file__).resolve().parent / "examples/benchmarks/kv_restore.py"


@pytest.mark.slow
def test_it_restores_the_whole_prefix_and_records_it(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    run_program(
        SCRIPT, "--tokens", "200", "--rounds", "1", "--offload-gib", "0.05", "--device", "cpu",
        "--output", str(output),
    )  # fmt: skip
    (line,) = output.read_text().splitlines()
    record = json.loads(line)
    assert record["workload"] == "kv_restore" and record["at"]["tokens"] == 200
    measured = record["measured"]
    assert measured["same_tokens"] == 1.0
    assert measured["restored_bytes"] == 192 // 16 * (16 * 18432 // 4)
    assert measured["restore_s"] > 0 and measured["recompute_s"] > 0
