"""Kernels of quantized weights, at a model's shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ....core.nn.quantized_weight import QuantizedWeight, round_to_fp8, round_to_words
from ....kernels.linear.gemv import gemv
from ....kernels.linear.int4_gemv import int4_gemv
from ....kernels.linear.quant_matmul import quant_matmul
from ....kernels.linear.small_m_matmul import (
    MAX_TILES,
    SmallMConfig,
    SplitKWorkspace,
    small_m_matmul,
    split_k_floats,
)
from ....kernels.quant.dequantize import dequantize_weight
from ....kernels.quant.quantize_rows import quantize_rows
from ....kernels.tuning import (
    Product,
    int4_gemv_config,
    int4_small_m_config,
)
from .case import EPS, Case, Work

GROUP = 128
FP8 = torch.float8_e4m3fn
INT4_ROWS = (8, 16, 64)
"""Tokens per call of the 4-bit kernels."""


def quant_cases(
    hidden: int,
    intermediate: int,
    tokens: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[Case]:
    """Yield the MLP's projections in fp8 and 4 bits, for one token and several; the other kernels
    once.
    """
    up, down = (2 * intermediate, hidden), (hidden, intermediate)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def weight(bits: int, rows: int, size: int) -> QuantizedWeight:
        if bits == 4:
            group = min(GROUP, size)
            words, scale = round_to_words(random(rows, size), 4, group)
            return QuantizedWeight(words, scale, group, bits=4)
        values, scales = round_to_fp8(random(rows, size))
        return QuantizedWeight(values, scales[None], size)

    def moved(bits: int, rows: int, size: int) -> float:
        scales = rows * -(-size // GROUP) * dtype.itemsize if bits == 4 else rows * 4
        return rows * size * bits / 8 + scales

    def workspace(count: int, outputs: int, config: SmallMConfig, gated: bool) -> SplitKWorkspace:
        floats = max(split_k_floats(count, outputs, config.split_k, gated), 1)
        return SplitKWorkspace(
            torch.empty(floats, device=device),
            torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
        )

    def one_row(bits: int, rows: int, size: int, gated: bool) -> Callable[[], Work]:
        def make() -> Work:
            x, quantized = random(1, size), weight(bits, rows, size)
            norm = (random(size), EPS)
            if bits == 8:
                return lambda: gemv(x, quantized, norm=norm, gated=gated)
            product = Product(rows // 2 if gated else rows, size, gated)
            config = int4_gemv_config(product, device)
            return lambda: int4_gemv(x, quantized, norm=norm, gated=gated, config=config)

        return make

    def fp8_rows(count: int, rows: int, size: int) -> Callable[[], Work]:
        def make() -> Work:
            x, quantized = random(count, size), weight(8, rows, size)
            return lambda: quant_matmul(x, quantized)

        return make

    def int4_rows(count: int, rows: int, size: int, gated: bool) -> Callable[[], Work]:
        outputs = rows // 2 if gated else rows

        def make() -> Work:
            x, quantized = random(count, size), weight(4, rows, size)
            config = int4_small_m_config(Product(outputs, size, gated), count, device)
            assert config is not None, "few enough rows"
            room = workspace(count, outputs, config, gated)
            return lambda: small_m_matmul(x, quantized, gated=gated, config=config, workspace=room)

        return make

    for (rows, size), gated in ((up, True), (down, False)):
        shape, number = f"fp8 {rows} x {size}", moved(8, rows, size)
        yield Case("gemv", shape, number, one_row(8, rows, size, gated))
        count = min(tokens[1], 16)
        make = fp8_rows(count, rows, size)
        yield Case("quant_matmul", f"{count} rows, {shape}", number, make)
        shape, number = f"int4 {rows} x {size}", moved(4, rows, size)
        yield Case("int4_gemv", shape, number, one_row(4, rows, size, gated))
        for count in INT4_ROWS:
            make = int4_rows(count, rows, size, gated)
            yield Case("small_m_matmul", f"{count} rows, {shape}", number, make)

    def dense_weight() -> Work:
        quantized = weight(4, *up)
        return lambda: dequantize_weight(quantized, dtype)

    dense = up[0] * up[1] * dtype.itemsize
    yield Case("dequantize_weight", f"int4 {up[0]} x {up[1]}", moved(4, *up) + dense, dense_weight)
    for count in tokens:

        def quantize(count: int = count) -> Work:
            x, norm = random(count, hidden), (random(hidden), EPS)
            return lambda: quantize_rows(x, FP8, norm=norm)

        number = count * (hidden * (dtype.itemsize + 1) + 4)
        yield Case("quantize_rows", f"{count} x {hidden}", number, quantize)
