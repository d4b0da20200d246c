"""`jackfield bench compare`: which lines are compared, and which of two numbers is better."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jackfield.entrypoints.bench.command import run

Line = dict[str, Any]


def line(engine: str, minute: int, **more: Any) -> Line:
    return {
        "date": f"2026-11-29T10:{minute:02}:00+00:00", "device": "H200", "engine": engine,
        "engine_version": "0.33.0" if engine == "vllm" else "0.1.0", "model": "Qwen3-8B",
        "workload": "chat", "at": {"max_concurrency": 256}, **more,
    }  # fmt: skip


def served(itl: float, rate: float) -> Line:
    return {"measured": {"requests_per_second": rate, "ttft_p50_ms": 30.0, "itl_p99_ms": itl}}


def compare(tmp_path: Path, lines: list[Line], *options: str) -> int:
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return run(["compare", str(file), "--markdown", *options])


def test_times_and_rates_are_better_in_their_own_direction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        line("jackfield", 1, **served(90.0, 1.0)),  # A later line takes its place.
        line("jackfield", 2, **served(40.0, 30.0)),
        line("jackfield", 2, workload="bursts", **served(1.0, 1.0)),  # The peer has no such load.
        line("vllm", 12, **served(50.0, 20.0)),
        line("vllm", 12, workload="agents", error="out of memory"),
    ]
    assert compare(tmp_path, lines) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2026-11-29 10:01, H200",
        "",
        "| what | number | jackfield | vllm 0.33.0 | jackfield: times better |",
        "| --- | --- | ---: | ---: | ---: |",
        "| Qwen3-8B chat max_concurrency=256 | requests_per_second | 30 | 20 | 1.5 |",
        "| Qwen3-8B chat max_concurrency=256 | ttft_p50_ms | 30 | 30 | 1 |",
        "| Qwen3-8B chat max_concurrency=256 | itl_p99_ms | 40 | 50 | 1.25 |",
        "",
    ]
    assert compare(tmp_path, lines, "--base", "jackfield", "--numbers", "itl_*") == 0
    (row,) = capsys.readouterr().out.splitlines()[4:-1]
    assert row == "| Qwen3-8B chat max_concurrency=256 | itl_p99_ms | 40 | 50 | 0.8 |"


@pytest.mark.parametrize("more", [{"device": "H100"}, {"date": "2026-11-29T12:00:00+00:00"}])
def test_devices_and_sittings_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: Line
) -> None:
    lines = [line("jackfield", 1, **served(40.0, 30.0)), line("vllm", 2, **more, **served(1, 1))]
    assert compare(tmp_path, lines) == 1
    assert capsys.readouterr().err == "no sitting has two engines (of 2 comparable lines)\n"


def test_options_tell_lines_of_one_engine_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        line("jackfield", 1, options=["--itl-target-ms", target], **served(itl, 30.0))
        for target, itl in (("0", 154.0), ("50", 77.0))
    ]
    assert compare(tmp_path, lines, "--numbers", "itl_p99_ms") == 0
    header, _, row = capsys.readouterr().out.splitlines()[2:-1]
    assert "jackfield --itl-target-ms 0 | jackfield --itl-target-ms 50" in header
    assert row.endswith("| 154 | 77 | 2 |")


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_line_that_is_no_result_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(text + "\n")
    with pytest.raises(SystemExit):
        run(["compare", str(file)])
    assert "results.jsonl, line 1" in capsys.readouterr().err
