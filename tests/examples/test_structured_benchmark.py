"""The benchmark of structured outputs runs on any machine, if small."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import forked
import pytest

import jackfield

SCRIPT = Path(jackfield.__file__).parent / "examples" / "benchmarks" / "structured_outputs.py"


@pytest.mark.slow
def test_it_compares_a_batch_with_and_without_a_schema(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    options = ["--model", "tiny", "--batch", "4", "--output", "16", "--repeats", "1"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    completed = forked.run(
        [sys.executable, str(SCRIPT), *options, "--out", str(out)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert [line["backend"].split()[0] for line in lines] == ["llguidance", "xgrammar"]
    for line in lines:
        assert line["at"]["batch"] == 4 and line["measured"]["ratio"] > 0
        assert line["measured"]["plain_tokens_per_second"] > 0
        assert line["measured"]["mask_us_per_row"] > 0
