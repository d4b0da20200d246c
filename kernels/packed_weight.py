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
import os
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
        return int(1 << (self.bits - 1)) if self.parts > 1 else 0


def largest_tile(weight: Packed, wanted: int) -> int:
    """Elements of a row to take at a time, a power of two up to `wanted`.

    With several scales a row, so few that a tile's columns share one, part by part.
    """
    width = weight.values.shape[1]
    if weight.grouped:
        common = math.gcd(width, weight.group_size)
        return int(min(wanted, common & -common))
    return int(min(wanted, triton.next_power_of_2(width)))


if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def _keep_fraction(bits, MASK: tl.constexpr):
        """Of each int32, the bits of MASK as a fraction, and the exponent of 1."""
        return (bits & MASK) | 0x3F800000

else:

    @triton.jit
    def _keep_fraction(bits, MASK: tl.constexpr):
        """The same in one instruction: the compiler makes two of it."""
        if MASK == 0x78000:
            kept = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x00078000, 0x3f800000, 0xea;", "=r,r", [bits],
                dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        elif MASK == 0x780000:
            kept = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x00780000, 0x3f800000, 0xea;", "=r,r", [bits],
                dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            tl.static_assert(MASK == 0x7F8000)
            kept = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x007f8000, 0x3f800000, 0xea;", "=r,r", [bits],
                dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        return kept


@triton.jit
def part_as_float(tile, PART: tl.constexpr, BITS: tl.constexpr):
    """Part PART of each int32 word, as float32: 1 + number / `part_unit(PART, BITS)`.

    The bits go where a float's largest fraction bits are, which needs no conversion; two parts of 4
    bits at once, so that they share a shift.
    """
    SHIFT: tl.constexpr = 15 - (PART * BITS // 8) * 8
    MASK: tl.constexpr = 0x7F8000 if BITS == 8 else (0x78000 if PART % 2 == 0 else 0x780000)
    if SHIFT >= 0:
        moved = tile << SHIFT
    else:
        moved = tile >> (-SHIFT)
    return _keep_fraction(moved, MASK).to(tl.float32, bitcast=True)


@triton.constexpr_function
def part_unit(part, bits):
    """What `part_as_float` divides numbers by."""
    return 16 if bits == 4 and part % 2 == 1 else 256
