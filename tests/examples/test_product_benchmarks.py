"""The benchmarks of products: by the number of tokens, and with weights read ahead."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import jackfield

BENCHMARKS = Path(jackfield.__file__).resolve().parent / "examples/benchmarks"


def program(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_number_of_tokens_has_its_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "lines.jsonl"
    argv = ["prompt_products.py", "--device", "cpu", "--divide", "64", "--tokens", "3", "8"]
    monkeypatch.setattr(sys, "argv", [*argv, "--output", str(output)])
    program("prompt_products").main()
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["at"]["tokens"] for line in lines] == [3, 8]
    for line in lines:
        measured = line["measured"]
        assert measured["us"] > 0
        each = measured["us"] / line["at"]["tokens"]
        assert measured["us_per_token"] == pytest.approx(each, abs=0.01)
    assert "us_per_token" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
def test_without_a_device_reading_ahead_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["weights_ahead.py"])
    assert program("weights_ahead").main() == 2
    assert "no CUDA device" in capsys.readouterr().err
