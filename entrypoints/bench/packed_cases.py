"""The kernels of quantized weights at a model's shapes, as kernel_cases.py has the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ...core.nn.packed import PackedWeight, round_to_fp8, round_to_words
from ...kernels.packed_gemv import packed_gemv
from ...kernels.packed_matmul import packed_matmul
from ...kernels.packed_weight import Packed
from ...kernels.quantize_rows import quantize_rows
from ...kernels.unpack_weight import unpack_weight

Work = Callable[[], object]
GROUP = 128
FP8 = torch.float8_e4m3fn
EPS = 1e-6


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
    """Both projections of the MLP in fp8 and in 4 bits, for one token and for 16; the rest once."""
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
            return lambda: packed_gemv(x, packed, norm=norm, gated=gated)

        return make

    def matmul(bits: int, rows: int, size: int) -> Callable[[], Work]:
        def make() -> Work:
            x, packed = random(tokens[1] if tokens[1] < 16 else 16, size), weight(bits, rows, size)
            return lambda: packed_matmul(x, packed)

        return make

    for bits, kind in ((8, "fp8"), (4, "int4")):
        for (rows, size), gated in ((up, True), (down, False)):
            shape, number = f"{kind} {rows} x {size}", moved(bits, rows, size)
            yield PackedCase("packed_gemv", shape, number, gemv(bits, rows, size, gated))
            yield PackedCase("packed_matmul", shape, number, matmul(bits, rows, size))

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
