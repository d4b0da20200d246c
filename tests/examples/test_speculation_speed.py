"""The benchmark of speculative decoding, at a size for a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import run_program

import jackfield

SCRIPT = Path(jackfield.__file__).resolve().parent / "examples/benchmarks/speculation.py"


@pytest.mark.slow
def test_it_compares_both_engines(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    options = ["--texts", "copied", "forced", "--drafts", "3", "--output-tokens", "24"]
    # On a busy machine drafts may not be worth their time.
    options += ["--speculative", '{"adaptive_width": false}']
    run_program(SCRIPT, *options, "--tokens", "40", "--device", "cpu", "--output", str(output))
    copied, forced = (json.loads(line) for line in output.read_text().splitlines())
    assert copied["at"]["text"] == "copied" and forced["at"]["text"] == "forced"
    for record in (copied, forced):
        assert record["measured"]["same_outputs"] == "1 of 1"
        assert record["measured"]["ratio"] > 0
    assert forced["measured"]["acceptance"] == 1.0
    assert forced["measured"]["tokens_per_step"] > 2
