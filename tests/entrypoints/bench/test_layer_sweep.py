"""Programs that time a layer in several ways: each model's each way is timed once, and recorded."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jackfield.entrypoints.bench.kernels import layer_sweep


def test_each_model_is_timed_each_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    ceilings = SimpleNamespace(copy_bytes_per_second=1e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(layer_sweep, "environment", lambda device: {"device": "a card"})
    monkeypatch.setattr(layer_sweep, "measure_ceilings", lambda *_: ceilings)
    monkeypatch.setattr(
        layer_sweep, "layer_of", lambda model: SimpleNamespace(num_bytes=len(model))
    )
    monkeypatch.setattr(layer_sweep, "TokenLayer", lambda shape, **sizes: (shape, sizes))
    output = tmp_path / "lines.jsonl"
    argv = ["program.py", "--models", "a", "four", "--context", "32", "--output", str(output)]
    monkeypatch.setattr("sys.argv", argv)
    prepared: list[list[str]] = []

    def seconds(layer: Any, way: int) -> float:
        shape, sizes = layer
        assert sizes == {"context": 32, "max_model_len": layer_sweep.MAX_MODEL_LEN} and prepared
        return float(shape.num_bytes * way) * 1e-9

    parser = layer_sweep.sweep_parser("Of a program.", ["b"])
    status = layer_sweep.sweep(
        parser, "of a test", [1, 2], lambda way: {"way": way}, seconds,
        lambda args: prepared.append(args.models),
    )  # fmt: skip
    assert status == 0 and prepared == [["a", "four"]]
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["model"], line["at"]["way"]) for line in lines] == [
        ("a", 1), ("a", 2), ("four", 1), ("four", 2)
    ]  # fmt: skip
    assert [line["measured"]["share_of_floor"] for line in lines] == [1.0, 0.5, 1.0, 0.5]
    assert all(line["workload"] == "of a test" for line in lines)
    assert "share_of_floor" in capsys.readouterr().out


def test_rules_are_as_before_also_after_an_error() -> None:
    kernel: Any = ModuleType("kernel")
    kernel.FIRST, kernel.SECOND = 1, 2
    with pytest.raises(ValueError), layer_sweep.changed_rules(kernel, FIRST=5):
        assert (kernel.FIRST, kernel.SECOND) == (5, 2)
        raise ValueError
    assert kernel.FIRST == 1
    with pytest.raises(AttributeError), layer_sweep.changed_rules(kernel, THIRD=3):
        pass
    assert not hasattr(kernel, "THIRD")
