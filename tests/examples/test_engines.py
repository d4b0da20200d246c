"""Other engines run the workloads of `jackfield bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jackfield.entrypoints.bench.command import run as bench
from jackfield.examples.benchmarks.engines import main


def test_another_engine_runs_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.jsonl"
    words = ["run", "W1", "--engine", "transformers"]
    small = ["--scale", "0.02", "--repeats", "1", "--device", "cpu", "--ceilings", "none"]
    assert main([*words, *small, "--output", str(out)]) == 0
    start, measured = [json.loads(line) for line in out.read_text().splitlines()]
    assert start["engine"] == measured["engine"] == "transformers"
    assert measured["measured"]["ms_per_token"] > 0
    with pytest.raises(SystemExit) as refused:
        bench(words)
    assert refused.value.code == 2 and "--engine" in capsys.readouterr().err


@pytest.mark.slow
def test_engines_are_compared_in_fresh_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    status = main(
        ["compare", "W1", "--engines", "jackfield", "transformers", "--scale", "0.02",
         "--repeats", "1", "--device", "cpu", "--output", str(out)]
    )  # fmt: skip
    assert status == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["engine"], line["workload"]) for line in lines] == [
        ("jackfield", "start"), ("jackfield", "W1"),
        ("transformers", "start"), ("transformers", "W1"),
    ]  # fmt: skip
    own, peer = lines[1]["measured"]["ms_per_token"], lines[3]["measured"]["ms_per_token"]
    output = capsys.readouterr().out
    assert "jackfield: times better" in output and f"{peer / own:.4g}" in output
