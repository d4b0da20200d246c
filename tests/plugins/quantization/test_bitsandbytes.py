"""bitsandbytes checkpoints, written by the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield.plugins.conformance.quantization import QuantizationKit
from jackfield.plugins.quantization.bitsandbytes import BitsAndBytes

if importlib.util.find_spec("bitsandbytes") is None:
    pytest.skip("bitsandbytes is not installed", allow_module_level=True)


class TestNf4(QuantizationKit):
    name = "bitsandbytes"
    experts = False
    config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    mismatched = {
        "load_in_8bit": True,
        "load_in_4bit": False,
        "bnb_4bit_quant_type": "int4",
        "bnb_4bit_quant_storage": "bfloat16",
        "llm_int8_skip_modules": "lm_head",
    }
    ignore_field = "llm_int8_skip_modules"

    def quantize(self, weight: torch.Tensor) -> Any:
        from bitsandbytes import functional  # Late: every process collects this file.

        packed, state = functional.quantize_4bit(
            weight,
            blocksize=64,
            quant_type=self.config.get("bnb_4bit_quant_type", "nf4"),
            compress_statistics=self.config.get("bnb_4bit_use_double_quant", False),
        )
        saved = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        return {"weight": packed, **saved}, functional.dequantize_4bit(packed, state)


class TestNestedNf4(TestNf4):
    config = {**TestNf4.config, "bnb_4bit_use_double_quant": True}


class TestRoundedAtLoad(TestNf4):
    config = {}
    mismatched = {}

    def quantize(self, weight: torch.Tensor) -> Any:
        return {"weight": weight}, super().quantize(weight)[1]


def test_without_the_package_the_reason_is_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = BitsAndBytes.supports(torch.device("cpu"), torch.float32)
    assert reason is not None and "pip install bitsandbytes" in reason


def test_a_package_that_cannot_be_imported_is_a_reason_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bitsandbytes.py").write_text("raise OSError('no such library')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    reason = BitsAndBytes.supports(torch.device("cpu"), torch.float32)
    assert reason is not None and "cannot be imported (no such library)" in reason
