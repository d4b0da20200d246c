"""The benchmarks of products: by the number of tokens, with weights read ahead, by how attention is
cut, and what it takes to wait for each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from programs import benchmark

pytest.importorskip("triton")


def test_each_number_of_tokens_has_its_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "lines.jsonl"
    argv = ["prompt_products.py", "--device", "cpu", "--divide", "64", "--tokens", "3", "8"]
    monkeypatch.setattr(sys, "argv", [*argv, "--output", str(output)])
    benchmark("prompt_products").main()
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["at"]["tokens"] for line in lines] == [3, 8]
    for line in lines:
        measured = line["measured"]
        assert measured["us"] > 0
        each = measured["us"] / line["at"]["tokens"]
        assert measured["us_per_token"] == pytest.approx(each, abs=0.01)
    assert "us_per_token" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
@pytest.mark.parametrize("name", ["weights_ahead", "attention_cuts", "launch_chain"])
def test_what_needs_a_device_is_refused_without_one(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    assert benchmark(name).main() == 2
    assert "no CUDA device" in capsys.readouterr().err
