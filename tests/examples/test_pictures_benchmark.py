"""The benchmark of prompts with pictures runs, and counts what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from programs import benchmark


@pytest.mark.slow
def test_pictures_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "pictures.jsonl"
    options = [
        "--shape", "tiny", "--side", "64", "--requests", "3", "--tokens", "5", "--device", "cpu",
        "--max-model-len", "512", "--output", str(output),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["pictures.py", *options])
    assert benchmark("pictures").main() == 0
    record = json.loads(output.read_text())
    assert record["engine"] == "jackfield"
    assert record["tokens_per_s"] == pytest.approx(15 / min(record["seconds"]))
