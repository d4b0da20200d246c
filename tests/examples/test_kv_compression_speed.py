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


def test_it_times_a_compaction_in_fresh_blocks_and_in_place(tmp_path: Path) -> None:
    options = ["--layers", "1", "--tokens", "70", "--policies", "key_norm", "--in-place"]
    found = records(tmp_path / "results.jsonl", "compaction", *options)
    assert [record["at"].get("in_place") for record in found] == [None, True]
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


@pytest.mark.slow
def test_a_setting_may_end_once_the_cache_is_full(tmp_path: Path) -> None:
    options = ["--model", "", "--tokens", "500", "--output-tokens", "120", "--requests", "6"]
    options += ["--fitting", "2", "--cells", "auto:none", "auto:0.5", "--prompt-interval", "128"]
    options += ["--until-full", "--full-steps", "8"]
    whole, compacted = records(tmp_path / "results.jsonl", "requests", *options)
    assert whole["measured"]["full_running"] == 2 and whole["measured"]["preemptions"] == 0
    assert compacted["measured"]["full_running"] == 4
    assert compacted["at"]["prompt_interval"] == 128
    assert compacted["measured"]["compactions"] >= 4 * 4
