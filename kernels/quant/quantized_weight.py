"""A linear layer's weight as kernels read it: dense, or quantized in one of a few layouts.

W[n, k] = (value[n, k] - zero[g, n]) * scale[g, n // scale_rows], g = k // group_size. Values are
float8_e4m3fn or int8, one per element, or unsigned numbers of 4 or 8 bits in int32 words: part i
(from the low bits) of word j in a row of `width` words is column i * width + j. So a tile of words
holds, part by part, runs of neighbouring columns, and inputs are read as contiguously as weights.
Words may also hold 4-bit floats (e2m1), in runs of a few: part i of word j in a run of n words
that begins with word r is column 8 * r + i * n + j. e2m1.py has the places of their bits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, Protocol, TypeAlias

import torch
import triton


class QuantizedWeight(Protocol):
    """A quantized weight of [N, K]: what kernels read of `core.nn.quantized_weight`'s, which they
    do not import.
    """

    @property
    def values(self) -> torch.Tensor:
        """[N, K] float8_e4m3fn or int8, or [N, K * bits / 32] int32; last stride 1, of 4-bit floats
        contiguous"""

    @property
    def scale(self) -> torch.Tensor:
        """[groups, ceil(N / scale_rows)], last stride 1"""

    @property
    def zero(self) -> torch.Tensor | None:
        """[groups, N] uint8, last stride 1; None: 0, and for words 2 ** (bits - 1)"""

    @property
    def group_size(self) -> int: ...

    @property
    def scale_rows(self) -> int: ...

    @property
    def bits(self) -> int: ...

    @property
    def e2m1_run(self) -> int | None:
        """Of words with 4-bit floats: how many are side by side; only the last run may be shorter,
        and each part is in one group. None: integers."""

    @property
    def pack_factor(self) -> int:
        """Columns per element of `values`."""

    @property
    def in_features(self) -> int:
        """K, the number of columns."""

    @property
    def grouped(self) -> bool:
        """Whether a row has several scales."""


Weight: TypeAlias = torch.Tensor | QuantizedWeight
"""[N, K], last stride 1; of experts [num_experts * N, K], an expert's rows side by side."""


@dataclasses.dataclass(frozen=True)
class TileFormat:
    """A weight's layout, a constant of the kernels that read it."""

    quantized: bool
    width: int
    pack_factor: int
    bits: int
    group_size: int
    scale_rows: int
    grouped: bool
    has_zero: bool
    offset: int
    """Subtracted from each number if there are no zeros."""
    run: int | None = None
    """Of 4-bit floats: words that are side by side; None: other numbers."""


class WeightArguments(NamedTuple):
    tensors: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
    """weight_ptr, scale_ptr, zero_ptr"""
    strides: tuple[int, int, int]
    """stride_weight, stride_scale, stride_zero: from row to row"""
    format: TileFormat


def weight_arguments(weight: Weight) -> WeightArguments:
    if isinstance(weight, torch.Tensor):
        width = int(weight.shape[1])
        dense = TileFormat(False, width, 1, 8, width, 1, False, False, 0)
        return WeightArguments((weight, None, None), (weight.stride(0), 0, 0), dense)
    values, scale, zero = weight.values, weight.scale, weight.zero
    assert weight.e2m1_run is None or values.is_contiguous(), "kernels rely on it"
    pack_factor, width = weight.pack_factor, int(values.shape[1])
    return WeightArguments(
        (values, scale, zero),
        (values.stride(0), scale.stride(0), 0 if zero is None else zero.stride(0)),
        TileFormat(
            quantized=True,
            width=width,
            pack_factor=pack_factor,
            bits=weight.bits,
            group_size=weight.group_size,
            scale_rows=weight.scale_rows,
            grouped=weight.grouped,
            has_zero=zero is not None,
            offset=1 << (weight.bits - 1) if pack_factor > 1 and weight.e2m1_run is None else 0,
            run=None if weight.e2m1_run is None else min(weight.e2m1_run, width),
        ),
    )


def values_of(weight: Weight) -> torch.Tensor:
    """Return the [N, width] elements or words of a weight."""
    return weight if isinstance(weight, torch.Tensor) else weight.values


def largest_tile(weight: Weight, limit: int) -> int:
    """Return the elements of a row per tile, a power of two up to `limit`."""
    width = int(values_of(weight).shape[1])
    if not isinstance(weight, torch.Tensor) and weight.grouped:
        common = weight.e2m1_run or math.gcd(width, weight.group_size)
        return int(min(limit, common & -common))
    return int(min(limit, triton.next_power_of_2(width)))


def even_tile(weight: Weight, limit: int) -> int:
    """Return `largest_tile`, or a smaller one, down to a quarter of `limit`, that divides a row."""
    width = int(values_of(weight).shape[1])
    if not isinstance(weight, torch.Tensor) and weight.grouped:
        return largest_tile(weight, limit)
    even = min(width & -width, limit)
    return even if 4 * even >= limit else largest_tile(weight, limit)
