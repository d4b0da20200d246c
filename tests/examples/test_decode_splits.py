"""The table of decode attention by division: both kernels, with the backend's own choice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from programs import benchmark

pytest.importorskip("triton")


def test_each_division_is_timed_for_both_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = benchmark("decode_splits")
    monkeypatch.setattr(script, "CONFIGS", script.CONFIGS[:1])
    monkeypatch.setattr(script, "PROGRAMS", (1,))
    output = tmp_path / "lines.jsonl"
    argv = ["decode_splits.py", "--sizes", "tiny", "--device", "cpu", "--shapes", "2x40"]
    monkeypatch.setattr(sys, "argv", [*argv, "--formats", "int8", "--output", str(output)])
    script.main()
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    found = [(line["at"]["kernel"], line["at"]["splits"], line["at"]["chosen"]) for line in lines]
    kernels = ("fused_decode_attention", "paged_attention_decode")
    # One program for a row and head, and two of 8 programs for 2 rows of 2 heads.
    assert found == [(kernel, splits, splits == 1) for splits in (1, 2) for kernel in kernels]
    assert all(line["measured"]["us"] > 0 for line in lines)
    assert "paged_attention_decode" in capsys.readouterr().out
