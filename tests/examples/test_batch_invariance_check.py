"""The benchmark of batch invariance, at a size for a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import run_program

import jackfield

SCRIPT = Path(jackfield.__file__).resolve().parent / "examples/benchmarks/batch_invariance.py"


@pytest.mark.slow
def test_it_counts_answers_that_differ_and_compares_speeds(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    common = ["--device", "cpu", "--vocab", "200", "--output-tokens", "5", "--output", str(output)]
    sizes = ["--requests", "6", "--rows", "6", "--max-model-len", "256"]
    run_program(SCRIPT, "check", "--batches", "3", "--control", "3", *sizes, *common)
    run_program(SCRIPT, "cost", "--row-counts", "1", "3", "--prompt-tokens", "20", *common)
    invariant, control, *costs = (json.loads(line) for line in output.read_text().splitlines())
    assert invariant["batch_invariant"] and not control["batch_invariant"]
    assert invariant["answers"] == control["answers"] > 0
    assert invariant["differing_tokens"] == invariant["differing_logprobs"] == 0
    assert control["differing_logprobs"] > 0
    assert [(each["batch_invariant"], each["rows"]) for each in costs] == [
        (False, 1), (False, 3), (True, 1), (True, 3),
    ]  # fmt: skip
    assert all(each["tokens_per_second"] > 0 for each in costs)
