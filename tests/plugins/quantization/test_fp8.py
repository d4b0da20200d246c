"""The fp8 method: every way a checkpoint may hold its scales, and rounding at load."""

from __future__ import annotations

from typing import Any

import torch
from through_triton import ThroughTriton

from jackfield.plugins.conformance.quantization import QuantizationKit

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def rounded(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """→ (float8, what it stands for)"""
    values = (weight / scale).clamp(-LARGEST, LARGEST).to(FP8)
    return values, values.float() * scale


class TestPerTensor(QuantizationKit):
    name = "fp8"
    config = {"activation_scheme": "dynamic"}
    mismatched = {
        "activation_scheme": "sometimes",
        "weight_block_size": [64, 64],
        "fmt": "e5m2",
        "modules_to_not_convert": "lm_head",
    }
    ignore_field = "modules_to_not_convert"
    rounding = 0.04

    def quantize(self, weight: torch.Tensor) -> Any:
        scale = weight.abs().max() / LARGEST
        values, dequantised = rounded(weight, scale)
        return {"weight": values, "weight_scale": scale.reshape(1)}, dequantised


class TestStatic(TestPerTensor):
    config = {"activation_scheme": "static", "ignored_layers": ["lm_head"]}

    def quantize(self, weight: torch.Tensor) -> Any:
        stored, dequantised = super().quantize(weight)
        stored["weight_scale"] = stored["weight_scale"].reshape(())
        return {**stored, "input_scale": torch.tensor(0.02)}, dequantised


class TestPerChannel(TestPerTensor):
    name = "fbgemm_fp8"

    def quantize(self, weight: torch.Tensor) -> Any:
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-9) / LARGEST
        values, dequantised = rounded(weight, scale)
        return {"weight": values, "weight_scale": scale}, dequantised


class TestBlocks(TestPerTensor):
    config = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}

    def quantize(self, weight: torch.Tensor) -> Any:
        rows, columns = (-(-size // 128) for size in weight.shape)
        scale = torch.ones(rows, columns)
        spread = torch.empty_like(weight)
        for i in range(rows):
            for j in range(columns):
                block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                scale[i, j] = weight[block].abs().max() / LARGEST
                spread[block] = scale[i, j]
        values, dequantised = rounded(weight, spread)
        return {"weight": values, "weight_scale_inv": scale}, dequantised


class TestRoundedAtLoad(QuantizationKit):
    name = "fp8"
    rounding = 0.04

    def quantize(self, weight: torch.Tensor) -> Any:
        scale = weight.abs().amax(dim=1, keepdim=True) / LARGEST
        return {"weight": weight}, rounded(weight, scale.clamp(min=1e-9))[1]


class TestThroughTriton(ThroughTriton, TestPerTensor):
    # On a GPU, more than 16 tokens are rounded to fp8, and come back as bfloat16.
    exact = 5e-3 if torch.cuda.is_available() else 1e-4
    product_error = 0.06 if torch.cuda.is_available() else 1e-4
