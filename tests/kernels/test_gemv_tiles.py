"""Tiles of products of one token come from the device's file, else from a rule."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from jackfield.kernels import tuning
from jackfield.kernels.linear.gemv import GemvConfig, gemv_config

CARD = torch.device("cuda", 0)
DEVICES = {"NVIDIA H200": GemvConfig(4, 512, 2), "another card": None}


@pytest.mark.parametrize("name", DEVICES)
def test_a_measured_choice_goes_before_the_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Nemotron-Mini's head, whose tiles no rule gives."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    for cached in (tuning._choices, tuning._measured_gemv):
        monkeypatch.setattr(tuning, cached.__name__, cached.__wrapped__)
    product = tuning.Product(256000, 3072, gated=False)
    assert tuning._measured_gemv(product, CARD) == DEVICES[name]
    assert tuning._measured_gemv(product._replace(gated=True), CARD) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"gemv": [{"outputs": 64}]}',
        '{"gemv": [{"outputs": 64, "inputs": 32, "gated": false, "rows": 1, "config": {"a": 1}}]}',
        '{"gemv": [{"outputs": 64, "inputs": 32, "gated": false, "rows": "1", "config": null}]}',
    ],
)
def test_a_damaged_file_is_left_out_with_a_warning(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a card")
    for cached in (tuning._choices, tuning._measured_gemv):
        monkeypatch.setattr(tuning, cached.__name__, cached.__wrapped__)
    (tmp_path / "a_card.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert tuning._measured_gemv(tuning.Product(64, 32, gated=False), CARD) is None
    assert "a_card.json is damaged" in caplog.text


@pytest.mark.parametrize("gated", [False, True])
def test_without_one_the_rule_decides(gated: bool) -> None:
    weight = torch.empty(64, 32, dtype=torch.bfloat16)
    assert tuning.gemv_tiles(weight, gated) == gemv_config(weight, gated)
