"""Tiles of products of one token come from the device's file, else from a rule."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from jackfield.kernels import tuning
from jackfield.kernels.linear import gemv as gemv_kernel
from jackfield.kernels.linear.gemv import EARLY_BYTES, GemvConfig, gemv, gemv_config

CARD = torch.device("cuda", 0)
HOPPER = tuning.Chip(9, 0, 132)
HEAD = tuning.Product(256000, 3072, gated=False)
"""Nemotron-Mini's"""


def measured_tiles() -> GemvConfig:
    """Return what the file of the H200 says of it."""
    entries = json.loads((tuning.FOLDER / "NVIDIA_H200.json").read_text())["gemv"]
    (config,) = (
        entry["config"]
        for entry in entries
        if tuning.Product(entry["outputs"], entry["inputs"], entry["gated"]) == HEAD
    )
    return GemvConfig(**config)


@pytest.mark.parametrize(
    ("name", "chip", "tiles"),
    [
        ("NVIDIA H200", HOPPER, measured_tiles()),
        ("NVIDIA H100 80GB HBM3", HOPPER, measured_tiles()),
        ("NVIDIA H100 PCIe", HOPPER._replace(multi_processor_count=114), None),
        ("another card", tuning.Chip(12, 0, 132), None),
    ],
)
def test_a_measured_choice_goes_before_the_rule(
    name: str,
    chip: tuning.Chip,
    tiles: GemvConfig | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that another card has measured is said."""
    caplog.set_level("INFO", "jackfield.kernels")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(tuning, "chip_of", lambda index: chip)
    for cached in (tuning._choices, tuning._measured_gemv):
        monkeypatch.setattr(tuning, cached.__name__, cached.__wrapped__)
    assert tuning._measured_gemv(HEAD, CARD) == tiles
    others = tiles is not None and name != "NVIDIA H200"
    assert ("another card" in caplog.text) is others
    assert tuning._measured_gemv(HEAD._replace(gated=True), CARD) is None


def test_a_cards_own_choices_go_before_those_of_its_chip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One model measured on a card leaves the others as they were; a library's product, too, is a
    choice."""
    caplog.set_level("INFO", "jackfield.kernels")
    first, second, third = (tuning.Product(64, inputs, gated=False) for inputs in (32, 64, 128))

    def write(name: str, chip: tuning.Chip, kernel: str, tiles: dict[tuning.Product, Any]) -> None:
        entries = [
            {**product._asdict(), "rows": 1, "config": config} for product, config in tiles.items()
        ]
        (tmp_path / name).write_text(json.dumps({"chip": chip._asdict(), kernel: entries}))

    def config(block_n: int) -> dict[str, int]:
        return {"block_n": block_n, "block_k": 64, "num_warps": 1}

    write("a_card.json", HOPPER, "gemv", {first: config(1), second: None})
    write(
        "another.json", HOPPER, "gemv", {product: config(2) for product in (first, second, third)}
    )
    write("older.json", tuning.Chip(8, 0, 132), "gemv", {tuning.Product(9, 9, gated=False): None})
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a card")
    monkeypatch.setattr(tuning, "chip_of", lambda index: HOPPER)
    choices = tuning._choices.__wrapped__(0, "gemv")
    assert choices == {
        first: [(1, GemvConfig(1, 64, 1))], second: [(1, None)], third: [(1, GemvConfig(2, 64, 1))]
    }  # fmt: skip
    assert "2 products measured on this card" in caplog.text and "(another.json)" in caplog.text
    assert tuning._choices.__wrapped__(0, "small_m_matmul") == {}
    caplog.clear()
    write("another.json", HOPPER, "gemv", {first: config(2)})
    assert tuning._choices.__wrapped__(0, "gemv").keys() == {first, second}
    assert not caplog.text, "it adds nothing"


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


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("early", [None, False, True])
def test_tiles_say_whether_the_next_kernel_starts_at_once(
    early: bool | None, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or by the size of the weight, where they do not."""
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(
        gemv_kernel, "launch", lambda *_: lambda *_, **options: launched.append(options)
    )
    width = 64
    weight = torch.empty(EARLY_BYTES // 2 // width if large else 8, width, dtype=torch.bfloat16)
    x = torch.empty(1, width, dtype=torch.bfloat16)
    gemv(x, weight, config=GemvConfig(4, 64, 1, early))
    assert [options["EARLY_LAUNCH"] for options in launched] == [large if early is None else early]


@pytest.mark.parametrize(
    ("width", "stride", "ahead", "asks"),
    [(256, 256, 132, True), (256, 256, 0, False), (256, 320, 132, False), (100, 100, 132, False)],
)
def test_programs_ask_for_rows_that_are_side_by_side(
    width: int, stride: int, ahead: int, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or for none: the instruction takes 1,024 bytes at a multiple of 16."""
    launched: list[dict[str, Any]] = []
    monkeypatch.setattr(gemv_kernel, "pdl_options", lambda device: {"launch_pdl": True})
    monkeypatch.setattr(
        gemv_kernel, "launch", lambda *_: lambda *_, **options: launched.append(options)
    )
    weight = torch.empty(8, stride, dtype=torch.bfloat16)[:, :width]
    x = torch.empty(1, width, dtype=torch.bfloat16)
    gemv(x, weight, config=GemvConfig(4, 64, 1, ahead=ahead))
    assert [options["AHEAD"] for options in launched] == [asks]
