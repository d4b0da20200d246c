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
HOPPER = tuning.Chip(9, 0, 132)
MEASURED = GemvConfig(4, 512, 2)


@pytest.mark.parametrize(
    ("name", "chip", "tiles"),
    [
        ("NVIDIA H200", HOPPER, MEASURED),
        ("NVIDIA H100 80GB HBM3", HOPPER, MEASURED),
        ("NVIDIA H100 PCIe", HOPPER._replace(multi_processor_count=114), None),
        ("another card", tuning.Chip(12, 0, 132), None),
    ],
)
def test_a_measured_choice_goes_before_the_rule(
    name: str, chip: tuning.Chip, tiles: GemvConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Nemotron-Mini's head, whose tiles no rule gives."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(tuning, "chip_of", lambda index: chip)
    for cached in (tuning._choices, tuning._measured_gemv):
        monkeypatch.setattr(tuning, cached.__name__, cached.__wrapped__)
    product = tuning.Product(256000, 3072, gated=False)
    assert tuning._measured_gemv(product, CARD) == tiles
    assert tuning._measured_gemv(product._replace(gated=True), CARD) is None


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a_card.json", ""),
        ("a_card.json", "[]"),
        ("a_card.json", '{"gemv": [{"outputs": 64}]}'),
        (
            "a_card.json",
            '{"gemv": [{"outputs": 64, "inputs": 32, "gated": false, "rows": 1,'
            ' "config": {"a": 1}}]}',
        ),
        (
            "a_card.json",
            '{"gemv": [{"outputs": 64, "inputs": 32, "gated": false, "rows": "1",'
            ' "config": null}]}',
        ),
        ("another_card.json", "{"),
        ("another_card.json", "[]"),
    ],
)
def test_a_damaged_file_is_left_out_with_a_warning(
    file: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a card")
    for cached in (tuning._choices, tuning._measured_gemv):
        monkeypatch.setattr(tuning, cached.__name__, cached.__wrapped__)
    monkeypatch.setattr(tuning, "chip_of", lambda index: HOPPER)
    (tmp_path / file).write_text(text)
    with caplog.at_level(logging.WARNING):
        assert tuning._measured_gemv(tuning.Product(64, 32, gated=False), CARD) is None
    assert f"{file} is damaged" in caplog.text


@pytest.mark.parametrize("gated", [False, True])
def test_without_one_the_rule_decides(gated: bool) -> None:
    weight = torch.empty(64, 32, dtype=torch.bfloat16)
    assert tuning.gemv_tiles(weight, gated) == gemv_config(weight, gated)
