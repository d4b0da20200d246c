"""The kernels of quantized weights at a model's shapes, as kernel_cases.py has the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ...core.nn.packed import PackedWeight, round_to_fp8, round_to_words
from ...kernels.nibble_gemv import nibble_gemv
from ...kernels.nibble_skinny import nibble_skinny
from ...kernels.packed_gemv import packed_gemv
from ...kernels.packed_matmul import packed_matmul
from ...kernels.packed_weight import Packed
from ...kernels.quantize_rows import quantize_rows
from ...kernels.skinny import MAX_TILES, SkinnyWorkspace, elements
from ...kernels.tuning import Product, nibble_gemv_shape, nibble_skinny_shape
from ...kernels.unpack_weight import unpack_weight

Work = Callable[[], object]
GROUP = 128
FP8 = torch.float8_e4m3fn
EPS = 1e-6
NIBBLE_ROWS = (8, 16, 64)
"""Tokens that are multiplied by 4-bit numbers at once"""


class PackedCase(NamedTuple):
    """As `kernel_cases.Case`, by position."""

    kernel: str
    shape: str
    bytes: float
    make: Callable[[], Work]


def packed_cases(
    hidden: int,
    intermediate: int,
    tokens: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[PackedCase]:
    """Both projections of the MLP in fp8 and in 4 bits, for one token and some; the rest once."""
    up, down = (2 * intermediate, hidden), (hidden, intermediate)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def weight(bits: int, rows: int, size: int) -> Packed:
        if bits == 4:
            group = min(GROUP, size)
            words, scale = round_to_words(random(rows, size), 4, group)
            made = PackedWeight(words, scale, group, bits=4)
        else:
            values, scales = round_to_fp8(random(rows, size))
            made = PackedWeight(values, scales[None], size)
        return Packed(made.values, made.scale, None, made.group_size, 1, made.bits)

    def moved(bits: int, rows: int, size: int) -> float:
        scales = rows * -(-size // GROUP) * dtype.itemsize if bits == 4 else rows * 4
        return rows * size * bits / 8 + scales

    def gemv(bits: int, rows: int, size: int, gated: bool) -> Callable[[], Work]:
        def make() -> Work:
            x, packed = random(1, size), weight(bits, rows, size)
            norm = (random(size), EPS)
            if bits == 8:
                return lambda: packed_gemv(x, packed, norm=norm, gated=gated)
            cut = nibble_gemv_shape(Product(rows // 2 if gated else rows, size, gated), device)
            return lambda: nibble_gemv(x, packed, norm=norm, gated=gated, shape=cut)

        return make

    def matmul(rows: int, size: int) -> Callable[[], Work]:
        def make() -> Work:
            x, packed = random(min(tokens[1], 16), size), weight(8, rows, size)
            return lambda: packed_matmul(x, packed)

        return make

    def skinny(count: int, rows: int, size: int, gated: bool) -> Callable[[], Work]:
        outputs = rows // 2 if gated else rows

        def make() -> Work:
            x, packed = random(count, size), weight(4, rows, size)
            cut = nibble_skinny_shape(Product(outputs, size, gated), count, device)
            assert cut is not None, "few enough rows"
            floats = max(elements(count, outputs, cut.split, gated), 1)
            room = SkinnyWorkspace(
                torch.empty(floats, device=device),
                torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
            )
            return lambda: nibble_skinny(x, packed, gated=gated, shape=cut, workspace=room)

        return make

    for (rows, size), gated in ((up, True), (down, False)):
        shape, number = f"fp8 {rows} x {size}", moved(8, rows, size)
        yield PackedCase("packed_gemv", shape, number, gemv(8, rows, size, gated))
        yield PackedCase("packed_matmul", shape, number, matmul(rows, size))
        shape, number = f"int4 {rows} x {size}", moved(4, rows, size)
        yield PackedCase("nibble_gemv", shape, number, gemv(4, rows, size, gated))
        for count in NIBBLE_ROWS:
            make = skinny(count, rows, size, gated)
            yield PackedCase("nibble_skinny", f"{count} rows, {shape}", number, make)

    def unpack() -> Work:
        packed = weight(4, *up)
        return lambda: unpack_weight(packed, dtype)

    dense = up[0] * up[1] * dtype.itemsize
    yield PackedCase("unpack_weight", f"int4 {up[0]} x {up[1]}", moved(4, *up) + dense, unpack)
    for count in tokens:

        def quantize(count: int = count) -> Work:
            x, norm = random(count, hidden), (random(hidden), EPS)
            return lambda: quantize_rows(x, FP8, norm=norm)

        number = count * (hidden * (dtype.itemsize + 1) + 4)
        yield PackedCase("quantize_rows", f"{count} x {hidden}", number, quantize)
