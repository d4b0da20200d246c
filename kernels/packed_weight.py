"""How kernels read a quantized weight: the layouts, and numbers out of words.

W[n, k] = (value[n, k] - zero[g, n]) * scale[g, n // scale_rows], g = k // group_size. Values are
float8_e4m3fn or int8, one an element, or unsigned numbers of 4 or 8 bits in int32 words: part i
(from the low bits) of word j in a row of `width` words is column i * width + j. So a tile of words
holds, part by part, runs of neighbouring columns, and inputs are read as contiguously as weights.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

WORD_BITS = 32


class Packed(NamedTuple):
    """A weight of [rows, size]."""

    values: torch.Tensor
    """[rows, size] float8_e4m3fn or int8, or [rows, size * bits / 32] int32; last stride 1"""
    scale: torch.Tensor
    """[groups, ceil(rows / scale_rows)], last stride 1"""
    zero: torch.Tensor | None
    """[groups, rows] uint8, last stride 1; None: 0, and for words 2 ** (bits - 1)"""
    group_size: int
    scale_rows: int
    bits: int

    @property
    def parts(self) -> int:
        """Columns to an element of `values`."""
        return WORD_BITS // self.bits if self.values.dtype == torch.int32 else 1

    @property
    def size(self) -> int:
        """Columns."""
        return int(self.values.shape[1]) * self.parts

    @property
    def grouped(self) -> bool:
        """A row has several scales."""
        return self.group_size < self.size

    @property
    def offset(self) -> int:
        """What is taken from each number where there are no zeros."""
        return 1 << (self.bits - 1) if self.parts > 1 else 0


def largest_tile(weight: Packed, wanted: int) -> int:
    """Elements of a row to take at a time, a power of two up to `wanted`.

    With several scales a row, so few that a tile's columns share one, part by part.
    """
    width = weight.values.shape[1]
    if weight.grouped:
        common = math.gcd(width, weight.group_size)
        return min(wanted, common & -common)
    return min(wanted, triton.next_power_of_2(width))


@triton.jit
def part_as_float(tile, PART: tl.constexpr, BITS: tl.constexpr):
    """Part PART of each int32 word, as float32: 1 + number / 2 ** BITS.

    The bits go where a float's largest fraction bits are, which needs no conversion.
    """
    SHIFT: tl.constexpr = 23 - BITS - PART * BITS
    MASK: tl.constexpr = ((1 << BITS) - 1) << (23 - BITS)
    if SHIFT >= 0:
        moved = tile << SHIFT
    else:
        moved = tile >> (-SHIFT)
    return ((moved & MASK) | 0x3F800000).to(tl.float32, bitcast=True)
