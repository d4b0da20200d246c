"""The benchmark of what KV compression costs and gives, at a size for a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import run_program

import jackfield

SCRIPT = Path(jackfield.__file__).resolve().parent / "examples/benchmarks/kv_compression.py"


def records(output: Path, *options: str) -> list[dict[str, Any]]:
    run_program(SCRIPT, *options, "--device", "cpu", "--output", str(output))
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_it_times_a_compaction_by_each_policy(tmp_path: Path) -> None:
    options = ["--layers", "1", "--tokens", "70", "--policies", "key_norm", "snap_kv"]
    found = records(tmp_path / "results.jsonl", "compaction", *options)
    assert [record["at"]["policy"] for record in found] == ["key_norm", "snap_kv"]
    for record in found:
        assert record["workload"] == "kv_compaction" and record["measured"]["ms"] > 0


@pytest.mark.slow
def test_more_requests_run_at_once_the_less_stays(tmp_path: Path) -> None:
    options = ["--model", "", "--tokens", "64", "--output-tokens", "16", "--requests", "6"]
    options += ["--fitting", "2", "--ratios", "none", "0.25", "--cache-types", "auto"]
    whole, compacted = records(tmp_path / "results.jsonl", "requests", *options)
    assert whole["at"]["ratio"] == "none" and whole["measured"]["compactions"] == 0
    assert compacted["measured"]["compactions"] == 6
    assert compacted["measured"]["running_most"] > whole["measured"]["running_most"]
    assert compacted["measured"]["output_tokens_per_second"] > 0
