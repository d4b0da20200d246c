"""Stored and rounded at load, it passes Jackfield's kit, and the numbers are the standard's."""

from __future__ import annotations

import math

import numpy as np
import torch
from jackfield_mxint8.method import round_to_blocks, whole

from jackfield.plugins.conformance.quantization import QuantizationKit


def by_the_book(weight: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The specification's formula, block by block: → (integers, exponents of the scales)."""
    rows, columns = weight.shape
    integers = np.zeros((rows, columns), np.int8)
    exponents = np.zeros((rows, columns // 32), np.int32)
    for row, values in enumerate(weight.double().numpy()):
        for block in range(columns // 32):
            part = values[block * 32 : block * 32 + 32]
            largest = np.abs(part).max()
            exponent = math.floor(math.log2(largest)) if largest else 0
            scaled = np.rint(part / 2.0**exponent * 64)
            integers[row, block * 32 : block * 32 + 32] = np.clip(scaled, -127, 127)
            exponents[row, block] = exponent
    return integers, exponents


def parts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """→ (integers, scales, the weight they stand for)"""
    integers, exponents = by_the_book(weight)
    scales = 2.0 ** exponents.astype(np.float64)
    dequantised = integers * np.repeat(scales, 32, axis=1) / 64
    return (
        torch.from_numpy(integers),
        torch.from_numpy(scales),
        torch.from_numpy(dequantised).float(),
    )


class TestStored(QuantizationKit):
    name = "mxint8"
    config = {"block_size": 32}
    mismatched = {"block_size": 16, "modules_to_not_convert": "lm_head"}
    ignore_field = "modules_to_not_convert"
    rounding = 0.01

    def quantize(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        integers, scales, dequantised = parts(weight)
        tensors = {"weight": integers, "weight_scale": scales.to(torch.float8_e8m0fnu)}
        return tensors, dequantised


class TestRoundedAtLoad(QuantizationKit):
    name = "mxint8"
    rounding = 0.01

    def quantize(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return {"weight": weight}, parts(weight)[2]


def test_large_small_and_zero_blocks() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    weight *= torch.tensor([1.0, 2.0**100, 2.0**-100, 0.0, 1.9999, 1e-3])[:, None]
    weight[4, 0] = 1.99999
    integers, scales = round_to_blocks(weight)
    expected, _, dequantised = parts(weight)
    assert torch.equal(integers, expected)
    assert torch.equal(whole(integers, scales), dequantised)
    assert integers.abs().max() == 127
