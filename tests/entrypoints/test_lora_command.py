"""`jackfield lora inspect`: what an adapter has, and whether a checkpoint's model takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters_made import make_adapter, q_proj_tensors, write_adapter

from jackfield.entrypoints.cli.main import main
from jackfield.plugins.adapters.peft import PeftFormat

from helpers import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"))


def inspect(capfd: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the report."""
    capfd.readouterr()
    status = main(["lora", "inspect", *map(str, argv), "--json"])
    report: dict[str, Any] = json.loads(capfd.readouterr().out)
    return status, report


def test_report_has_what_the_adapter_has(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = make_adapter(
        model, tmp_path / "adapter", target_modules=["q_proj", "k_proj"],
        rank_pattern={"layers.1.self_attn.q_proj": 6}, trainable_token_indices=[3, 5],
        lora_dropout=0.1, use_rslora=True,
    )  # fmt: skip
    status, report = inspect(capfd, adapter, "--model", model)
    assert (status, report["servable"], report["format"]) == (0, True, "peft")
    assert report["digest"] == PeftFormat.read(adapter).digest
    changes = {change["layers"]: change for change in report["changes"]}
    assert changes.keys() == {
        "model.embed_tokens",
        "model.layers.*.self_attn.k_proj",
        "model.layers.*.self_attn.q_proj",
    }
    q_proj = changes["model.layers.*.self_attn.q_proj"]
    assert q_proj["ranks"] == [4, 6] and q_proj["scales"] == [6 / 6**0.5, 3.0]
    assert q_proj["shapes"] == ["64 → 64"] and q_proj["count"] == 3
    assert q_proj["nbytes"] == 4 * (4 + 6 + 4) * (64 + 64)
    assert changes["model.embed_tokens"]["kind"] == "tokens"
    assert report["nbytes"] == 2 * report["nbytes_16_bit"]
    assert "plain" not in report and any("lora_dropout" in note for note in report["notes"])


def test_text_is_for_people(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=["q_proj"])
    assert main(["lora", "inspect", str(adapter)]) == 0
    text = capfd.readouterr().out
    for part in ("model.layers.*.self_attn.q_proj", "64 → 64", "1.5", "float32", "recorded"):
        assert part in text


@pytest.mark.parametrize(
    ("tensors", "settings", "param"),
    [
        pytest.param(q_proj_tensors(), {}, "lora_path", id="sizes of another model"),
        pytest.param(q_proj_tensors("model.layers.9.x_proj"), {}, "lora_path", id="no such layer"),
        pytest.param(q_proj_tensors(), {"r": 4}, "r", id="malformed"),
        pytest.param({"a": torch.ones(1)}, {"use_qalora": True}, "use_qalora", id="method"),
    ],
)
def test_an_adapter_that_cannot_be_served_says_why(
    tensors: dict[str, torch.Tensor], settings: dict[str, Any], param: str, model: Path,
    tmp_path: Path, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    adapter = write_adapter(tmp_path / "adapter", tensors, **settings)
    status, report = inspect(capfd, adapter, "--model", model)
    assert (status, report["servable"], report["param"]) == (1, False, param)
    assert main(["lora", "inspect", str(adapter), "--model", str(model)]) == 1
    assert report["reason"] in capfd.readouterr().out


def test_no_adapter_and_no_model_are_told_apart(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, report = inspect(capfd, tmp_path / "nowhere")
    assert (status, report["servable"]) == (1, False)
    adapter = write_adapter(tmp_path / "adapter", q_proj_tensors())
    assert main(["lora", "inspect", str(adapter), "--model", str(tmp_path / "none")]) == 2
    assert "none" in capfd.readouterr().err
