"""Kernels of quantized weights against their torch references."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from jackfield.core.nn.quantized_weight import QuantizedWeight, e2m1_run, pack_e2m1, pack_words
from jackfield.kernels import reference
from jackfield.kernels.linear.gemv import GemvConfig, gemv
from jackfield.kernels.linear.int4_gemv import Int4GemvConfig, int4_gemv
from jackfield.kernels.linear.quant_matmul import (
    QuantMatmulConfig,
    quant_matmul,
    quant_matmul_supports,
)
from jackfield.kernels.linear.small_m_matmul import (
    SmallMConfig,
    SplitKWorkspace,
    small_m_matmul,
)
from jackfield.kernels.linear.split_k_sum import split_k_sum
from jackfield.kernels.quant.dequantize import dequantize_weight
from jackfield.kernels.quant.int4_unpack import int4_tile
from jackfield.kernels.quant.quantize_rows import quantize_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = torch.float8_e4m3fn
# The interpreter's products of bfloat16 are wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def quantized(
    kind: str, rows: int, size: int, group: int, scale_dtype: torch.dtype
) -> QuantizedWeight:
    """A random weight of about unit rows."""
    generator = torch.Generator().manual_seed(rows + size)
    groups = -(-size // group)
    bits, scale_rows = 8, 1
    zero = run = None
    if kind == "e2m1":
        bits, run = 4, e2m1_run(size, group)
        assert run is not None
        values = pack_e2m1(torch.randint(0, 16, (rows, size), generator=generator), run)
        spread = 2.8
    elif kind == "fp8":
        values = (torch.randn(rows, size, generator=generator) * 64).to(FP8)
        spread = 64.0
    elif kind == "int8":
        values = torch.randint(-127, 128, (rows, size), generator=generator, dtype=torch.int8)
        spread = 74.0
    else:
        bits = int(kind[-1])
        spread = 0.29 * (1 << bits)
        numbers = torch.randint(0, 1 << bits, (rows, size), generator=generator)
        values = pack_words(numbers, bits)
        if kind.startswith("zero"):
            shape = (groups, rows)
            zero = torch.randint(0, (1 << bits) + 1 - bits // 8, shape, generator=generator).to(
                torch.uint8
            )
    if kind == "fp8" and groups > 1:
        scale_rows = 16
    scale = torch.rand(groups, -(-rows // scale_rows), generator=generator) + 0.5
    scale = (scale / spread / size**0.5).to(scale_dtype)
    zero = None if zero is None else zero.to(DEVICE)
    return QuantizedWeight(values.to(DEVICE), scale.to(DEVICE), group, zero, scale_rows, bits, run)


WEIGHTS = [
    ("fp8", 24, 96, 96), ("fp8", 19, 96, 32), ("int8", 24, 100, 100), ("words4", 24, 256, 32),
    ("zeros4", 20, 256, 16), ("words8", 24, 128, 128), ("zeros8", 22, 128, 32),
]  # fmt: skip
FLOATS = [("e2m1", 24, 320, 32), ("e2m1", 20, 160, 32), ("e2m1", 20, 144, 16)]
"""The last run of a row is shorter, as wide as a group of scales or as half of it."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", [*WEIGHTS, *FLOATS], ids=lambda w: f"{w[0]}-{w[2]}-{w[3]}")
def test_unpacked_weights_equal_their_references(dtype: torch.dtype, weight: Any) -> None:
    weights = quantized(*weight, dtype)
    assert weights.in_features == weight[2]
    close(dequantize_weight(weights, dtype), reference.dequantize_weight(weights, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", [*WEIGHTS, *FLOATS], ids=lambda w: f"{w[0]}-{w[2]}-{w[3]}")
@pytest.mark.parametrize("after", ["gated", "residual", "nothing"])
def test_quantized_gemv_equals_its_reference(dtype: torch.dtype, weight: Any, after: str) -> None:
    weights = quantized(*weight, torch.float32)
    rows, size = weights.values.shape[0], weights.in_features
    if after == "gated" and rows % 2:
        pytest.skip("a gate needs two halves")
    x = draw(1, size, dtype=dtype)
    of_norm = torch.float32 if after == "gated" else dtype
    options = {
        "bias": draw(rows, dtype=dtype) if after != "nothing" else None,
        "norm": (draw(size, dtype=of_norm, seed=1) + 1, 1e-6) if after != "nothing" else None,
        "residual": draw(1, rows, dtype=dtype, seed=2) if after == "residual" else None,
        "gated": after == "gated",
    }
    expected = reference.gemv(x, weights, **options)
    config = None if after == "nothing" else GemvConfig(8, 32, 1)
    close(gemv(x, weights, **options, config=config), expected)


def workspace() -> SplitKWorkspace:
    return SplitKWorkspace(
        torch.empty(1 << 14, device=DEVICE), torch.zeros(64, dtype=torch.int32, device=DEVICE)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda w: f"{w[0]}-{w[2]}-{w[3]}")
@pytest.mark.parametrize("split_k", [1, 3])
def test_few_rows_by_quantized_weights_equal_their_reference(
    dtype: torch.dtype, weight: Any, split_k: int
) -> None:
    weights = quantized(*weight, torch.float32)
    x = draw(19, weights.in_features, dtype=dtype)
    options = {
        "bias": draw(weights.values.shape[0], dtype=dtype),
        "residual": draw(19, weights.values.shape[0], dtype=dtype, seed=2),
    }
    expected = reference.small_m_matmul(x, weights, **options)
    config, room = SmallMConfig(16, 16, 16, split_k, 4, 2), workspace()
    close(small_m_matmul(x, weights, **options, config=config, workspace=room), expected)
    assert not room.counters.any()
    if split_k == 1:
        close(
            small_m_matmul(x[:3], weights, config=config), reference.small_m_matmul(x[:3], weights)
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", [*WEIGHTS, *FLOATS], ids=lambda w: f"{w[0]}-{w[2]}-{w[3]}")
@pytest.mark.parametrize("split_k", [1, 3])
def test_quant_matmul_equals_its_reference(dtype: torch.dtype, weight: Any, split_k: int) -> None:
    weights = quantized(*weight, torch.float32)
    x = draw(19, weights.in_features, dtype=dtype)
    options = {
        "bias": draw(weights.values.shape[0], dtype=dtype),
        "residual": draw(19, weights.values.shape[0], dtype=dtype, seed=2),
    }
    expected = reference.small_m_matmul(x, weights, **options)
    config = QuantMatmulConfig(16, 16, 16, split_k, 4, 2)
    close(quant_matmul(x, weights, **options, config=config), expected)
    if split_k == 1:
        close(quant_matmul(x[:3], weights), reference.small_m_matmul(x[:3], weights))


@pytest.mark.parametrize("split_k", [1, 3])
def test_rows_may_share_the_scale_of_one_group(split_k: int) -> None:
    weights = quantized("fp8", 40, 96, 96, torch.float32)
    scale = weights.scale[:, :3] * torch.tensor([1.0, 2.0, 0.5], device=DEVICE)
    weights = weights._replace(scale=scale.contiguous(), scale_rows=16)
    x = draw(19, 96, dtype=torch.float32)
    expected = reference.small_m_matmul(x, weights)
    dense = weights.values.float() * scale[0].repeat_interleave(16)[:40, None]
    close(expected, x @ dense.T)
    close(quant_matmul(x, weights, config=QuantMatmulConfig(16, 16, 16, split_k, 4, 2)), expected)
    close(small_m_matmul(x, weights, config=SmallMConfig(32, 16, 32, 1, 4, 2)), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_fp8_is_multiplied_as_it_is(dtype: torch.dtype) -> None:
    """The smallest ones and both zeros, too."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers[127] = numbers[255] = 0  # NaN
    values = numbers.view(16, 16).repeat(1, 2).view(FP8).to(DEVICE)
    weights = QuantizedWeight(values, torch.ones(1, 16, device=DEVICE), 32)
    x = torch.eye(32, dtype=dtype, device=DEVICE)[:16]
    outputs = small_m_matmul(x, weights, config=SmallMConfig(16, 16, 32, 1, 4, 2))
    assert torch.equal(outputs.T.float(), values[:, :16].float())


def test_rows_narrower_than_a_tile_are_multiplied() -> None:
    weights = quantized("zeros4", 20, 64, 64, torch.float32)
    x = draw(3, 64, dtype=torch.float32)
    close(quant_matmul(x, weights), reference.small_m_matmul(x, weights))


def test_groups_that_are_too_narrow_for_a_tile_are_refused() -> None:
    weights = quantized("words4", 16, 64, 8, torch.float32)
    assert not quant_matmul_supports(weights)
    x = draw(2, 64, dtype=torch.float32)
    with pytest.raises(ValueError, match="groups of 8"):
        quant_matmul(x, weights)
    with pytest.raises(ValueError, match="groups of 8"):
        small_m_matmul(x, weights, config=SmallMConfig(16, 16, 16, 1, 4, 2))


INT4 = [
    ("words4", 24, 256, 32), ("zeros4", 44, 384, 16), ("zeros4", 40, 512, 64),
    ("words4", 36, 768, 768),
]  # fmt: skip
EVEN_FLOATS = [("e2m1", 24, 512, 32), ("e2m1", 20, 640, 16)]
SIXTEEN_BITS = [torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("weight", [*INT4, *EVEN_FLOATS], ids=lambda w: f"{w[0]}-{w[2]}-{w[3]}")
@pytest.mark.parametrize("after", ["gated", "residual", "nothing"])
def test_int4_gemv_equals_its_reference(dtype: torch.dtype, weight: Any, after: str) -> None:
    weights = quantized(*weight, torch.float32)
    rows, size = weights.values.shape[0], weights.in_features
    x = draw(1, size, dtype=dtype)
    of_norm = torch.float32 if after == "gated" else dtype
    options = {
        "bias": draw(rows, dtype=dtype) if after != "nothing" else None,
        "norm": (draw(size, dtype=of_norm, seed=1) + 1, 1e-6) if after != "nothing" else None,
        "residual": draw(1, rows, dtype=dtype, seed=2) if after == "residual" else None,
        "gated": after == "gated",
    }
    config = Int4GemvConfig(32, 4, 2)
    expected = reference.gemv(x, weights, **options)
    close(int4_gemv(x, weights, **options, config=config), expected)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("weight", INT4, ids=lambda w: f"{w[0]}-{w[2]}-{w[3]}")
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("block_m", [64, 16], ids=["scaled numbers", "scaled sums"])
def test_few_rows_by_4_bits_equal_their_reference(
    dtype: torch.dtype, weight: Any, gated: bool, block_m: int
) -> None:
    weights = quantized(*weight, dtype)
    rows = weights.values.shape[0]
    x = draw(19, weights.in_features, dtype=dtype)
    options = {
        "bias": draw(rows, dtype=dtype),
        "residual": None if gated else draw(19, rows, dtype=dtype, seed=2),
    }
    expected = reference.small_m_matmul(x, weights, **options)
    if gated:
        gate, up = expected.float().chunk(2, dim=1)
        expected = (torch.nn.functional.silu(gate) * up).to(dtype)
    room = workspace()
    for split_k in (1, 3):
        config = SmallMConfig(block_m, 32, 16, split_k, 2, 2)
        actual = small_m_matmul(x, weights, **options, gated=gated, config=config, workspace=room)
        # A gate's reference rounds before the gate, and numbers are rounded when they are scaled.
        tolerance = TOLERANCE[dtype] * (3 if gated or block_m >= 64 else 1)
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
        assert not room.counters.any()


def test_runs_of_words_keep_to_a_group_and_divide_the_row() -> None:
    assert int4_tile(quantized("words4", 16, 1024, 128, torch.float32), 64) == 64
    assert int4_tile(quantized("words4", 16, 1024, 32, torch.float32), 64) == 32
    assert int4_tile(quantized("words4", 16, 768, 768, torch.float32), 64) == 32
    # Fewer columns a group than the matrix unit takes, 8 bits, and a row of 8 * 13 words.
    assert int4_tile(quantized("words4", 16, 1024, 8, torch.float32), 64) == 0
    assert int4_tile(quantized("words8", 16, 1024, 128, torch.float32), 64) == 0
    assert int4_tile(quantized("words4", 16, 832, 832, torch.float32), 64) == 0
    # Of floats a run, which divides the row, or does not.
    assert int4_tile(quantized("e2m1", 16, 768, 32, torch.float32), 64) == 32
    assert int4_tile(quantized("e2m1", 16, 640, 16, torch.float32), 64) == 16
    assert int4_tile(quantized("e2m1", 16, 320, 32, torch.float32), 64) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("to", [FP8, torch.int8], ids=str)
@pytest.mark.parametrize("norm", ["norm", "float32 norm", "no norm"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_quantized_rows_equal_their_reference(
    dtype: torch.dtype, to: torch.dtype, norm: str, static: bool
) -> None:
    x = draw(5, 200, dtype=dtype) * 3
    x[3] = 0.0
    of_norm = torch.float32 if norm == "float32 norm" else dtype
    options = {
        "norm": (draw(200, dtype=of_norm, seed=1) + 1, 1e-6) if norm != "no norm" else None,
        "scale": torch.tensor([0.02], device=DEVICE) if static else None,
    }
    values, scales = quantize_rows(x, to, **options)
    want_values, want_scales = reference.quantize_rows(x, to, **options)
    torch.testing.assert_close(scales, want_scales, rtol=1e-3, atol=0)
    actual, expected = (v.float() for v in (values, want_values))
    # A number at a border may fall to either side. The interpreter halves one that rounds up to a
    # power of two.
    step = expected.abs() / (8 if DEVICE.type == "cuda" else 2) + 2**-9
    assert ((actual - expected).abs() <= (step if to == FP8 else torch.ones_like(expected))).all()
    assert (actual == expected).float().mean() > (0.98 if DEVICE.type == "cuda" else 0.95)
    assert not actual[3].any()


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
def test_finished_products_equal_their_reference(scaled: bool) -> None:
    parts = draw(3, 5, 1100, dtype=torch.float32)
    if scaled:
        parts = (parts[:1] * 1000).to(torch.int32)
    options = {
        "bias": draw(1100, dtype=torch.float16),
        "residual": draw(5, 1100, dtype=torch.float16, seed=1),
        "row_scale": torch.rand(5, device=DEVICE) / 1000 if scaled else None,
        "column_scale": torch.rand(1100, device=DEVICE) if scaled else None,
    }
    actual, expected = (torch.empty(5, 1100, dtype=torch.float16, device=DEVICE) for _ in range(2))
    split_k_sum(parts, actual, **options)
    close(actual, reference.split_k_sum(parts, expected, **options))
