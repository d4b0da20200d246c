"""The front end alone: what a streamed token costs is counted without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jackfield.examples.benchmarks.frontend.command import run


def test_the_front_end_is_timed_without_a_model(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    status = run(
        ["chat", "parsers", "--parts", "--streams", "4", "--tokens", "120",
         "--repeats", "1", "--output", str(out)]
    )  # fmt: skip
    assert status == 0
    chat, parts, parsers, _ = [json.loads(line) for line in out.read_text().splitlines()]
    assert chat["at"]["case"] == "chat" and chat["at"]["streams"] == 4
    # Roles, usage and ends have frames of their own; a character of several tokens has one, and so
    # have the tokens that a client on a busy machine did not read in time.
    assert 0.2 < chat["measured"]["frames_per_token"] < 1.1
    assert parts["workload"] == "frontend-parts" and parts["measured"]["detokenize"] > 0
    for line in (chat, parsers):
        assert line["workload"] == "frontend"
        # Processor time comes in ticks: little of it may be none.
        assert all(value >= 0 for value in line["measured"].values())
        assert any(value > 0 for value in line["measured"].values())


@pytest.mark.slow
def test_front_ends_in_processes_of_their_own_are_timed_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    flags = ["chat", "--api-server-count", "2"]
    status = run(
        [*flags, "--step-ms", "2", "--streams", "8", "--tokens", "400", "--repeats", "1",
         "--output", str(out)]
    )  # fmt: skip
    assert status == 0
    (record,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert record["at"]["api_server_count"] == 2 and record["at"]["step_ms"] == 2
    measured = record["measured"]
    assert measured["cpu_us_per_token"] == pytest.approx(
        measured["engine_cpu_us_per_token"] + measured["fronts_cpu_us_per_token"], rel=1e-3
    )
    assert 0.5 <= measured["busiest_front_share"] <= 1
    for wrong in (flags, ["--api-server-count", "0"], [*flags, "--parts"]):
        with pytest.raises(SystemExit):
            run(wrong)
    assert "needs --step-ms" in capsys.readouterr().err
