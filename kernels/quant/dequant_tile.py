"""Dequantisation of a weight's tile in a kernel, for all formats.

A tile is [BLOCK_N, BLOCK_K] elements of a weight, each of FORMAT.pack_factor columns (parts):
`unpack_tile` once per tile, `dequant_tile` per part. Kernels for one row of 4-bit numbers have
another method, diagonal_sums.py: it corrects sums of the tensor core, not numbers.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from ..widen import widen_tile
from .e2m1 import e2m1_unit, part_as_e2m1, split_e2m1, unpack_e2m1
from .int4_unpack import int4_base, multiply_pairs, subtract_pairs, unpack_int4

if os.environ.get("TRITON_INTERPRET") == "1":

    @triton.jit
    def _keep_fraction(bits, MASK: tl.constexpr):
        return (bits & MASK) | 0x3F800000

else:

    @triton.jit
    def _keep_fraction(bits, MASK: tl.constexpr):
        """Do the same in one instruction; the compiler would emit two."""
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
    """Return part PART of each int32 word as float32: 1 + number / `part_unit(PART, BITS)`.

    The bits are moved to a float's largest fraction bits, which needs no conversion; two
    neighbouring parts of 4 bits share a shift.
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
    """Return the divisor of the numbers in `part_as_float`."""
    return 16 if bits == 4 and part % 2 == 1 else 256


@triton.constexpr_function
def in_pairs(dtype, format):
    """Return whether numbers are unpacked in pairs, to 16-bit floats."""
    return format.pack_factor == 8 and dtype.primitive_bitwidth == 16


@triton.jit
def part_column(start, PART: tl.constexpr, FORMAT: tl.constexpr):
    """Return the column of part PART of element `start` of a row."""
    if FORMAT.run is None:
        return PART * FORMAT.width + start
    else:
        REST: tl.constexpr = FORMAT.width % FORMAT.run
        # The last run may be shorter. Written so that the compiler finds the alignment: it does not
        # with a remainder, nor with the smaller of two lengths.
        first = start // FORMAT.run * FORMAT.run
        whole = first + FORMAT.run <= FORMAT.width
        skipped = tl.where(whole, PART * FORMAT.run, PART * REST)
        return FORMAT.pack_factor * first + skipped + (start - first)


@triton.jit
def unpack_tile(tile, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Return the tile as `dequant_tile` takes it: for 4 bits in a 16-bit dtype, a tuple of 8, or of
    floats two halves."""
    if in_pairs(dtype, FORMAT):
        if FORMAT.run is not None:
            return split_e2m1(tile)
        else:
            return unpack_int4(tile, dtype)
    else:
        return tile


@triton.jit
def load_zero(zero_ptr, offs_n, in_n, group, stride_zero, FORMAT: tl.constexpr):
    if FORMAT.has_zero:
        zero = tl.load(zero_ptr + group * stride_zero + offs_n, mask=in_n, other=0)
        return zero.to(tl.float32)[:, None]
    else:
        return tl.full([1, 1], FORMAT.offset, tl.float32)


@triton.jit
def load_scale(scale_ptr, offs_n, in_n, group, stride_scale, FORMAT: tl.constexpr):
    ptrs = scale_ptr + group * stride_scale + offs_n // FORMAT.scale_rows
    return tl.load(ptrs, mask=in_n, other=0.0)[:, None]


@triton.jit
def _part_scale(scale_ptrs, start, in_n, stride_scale, PART: tl.constexpr, FORMAT: tl.constexpr):
    group = part_column(start, PART, FORMAT) // FORMAT.group_size
    return tl.load(scale_ptrs + group * stride_scale, mask=in_n, other=0.0)


@triton.jit
def load_part_scales(scale_ptrs, start, in_n, stride_scale, FORMAT: tl.constexpr):
    """Return the scales of each part of a tile, a tuple of [BLOCK_N]; start: its first element."""
    if FORMAT.pack_factor == 8:
        return (
            _part_scale(scale_ptrs, start, in_n, stride_scale, 0, FORMAT),
            _part_scale(scale_ptrs, start, in_n, stride_scale, 1, FORMAT),
            _part_scale(scale_ptrs, start, in_n, stride_scale, 2, FORMAT),
            _part_scale(scale_ptrs, start, in_n, stride_scale, 3, FORMAT),
            _part_scale(scale_ptrs, start, in_n, stride_scale, 4, FORMAT),
            _part_scale(scale_ptrs, start, in_n, stride_scale, 5, FORMAT),
            _part_scale(scale_ptrs, start, in_n, stride_scale, 6, FORMAT),
            _part_scale(scale_ptrs, start, in_n, stride_scale, 7, FORMAT),
        )
    elif FORMAT.pack_factor == 4:
        return (
            _part_scale(scale_ptrs, start, in_n, stride_scale, 0, FORMAT),
            _part_scale(scale_ptrs, start, in_n, stride_scale, 1, FORMAT),
            _part_scale(scale_ptrs, start, in_n, stride_scale, 2, FORMAT),
            _part_scale(scale_ptrs, start, in_n, stride_scale, 3, FORMAT),
        )
    else:
        tl.static_assert(FORMAT.pack_factor == 1)
        return (_part_scale(scale_ptrs, start, in_n, stride_scale, 0, FORMAT),)


@triton.jit
def dequant_tile(
    tile,
    scale,
    zero,
    PART: tl.constexpr,
    dtype: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Return part PART of a tile, [BLOCK_N, BLOCK_K] of `dtype`: (value - zero) * scale with
    SCALED, otherwise value - zero, which is exact.

    tile: from `unpack_tile`; scale: [BLOCK_N, 1] of any type, read if SCALED; zero: from
    `load_zero`, not read for 4-bit floats.
    """
    if FORMAT.run is not None:
        UNIT: tl.constexpr = e2m1_unit(dtype)
        if in_pairs(dtype, FORMAT):
            value = unpack_e2m1(tile, PART, dtype)
            factor = tl.full(value.shape, UNIT, dtype)
            if SCALED:
                factor = (scale.to(tl.float32) * UNIT).to(dtype)
                factor = tl.broadcast_to(factor, value.shape)
            return multiply_pairs(value, factor)
        else:
            factor = scale.to(tl.float32) * UNIT if SCALED else UNIT
            return (part_as_e2m1(tile, PART) * factor).to(dtype)
    elif in_pairs(dtype, FORMAT):
        value = tile[PART]
        base = (zero + int4_base(dtype)).to(dtype)
        value = subtract_pairs(value, tl.broadcast_to(base, value.shape))
        if SCALED:
            value = multiply_pairs(value, tl.broadcast_to(scale.to(dtype), value.shape))
        return value
    elif FORMAT.pack_factor > 1:
        # unit + number: subtract the unit and the zero together.
        unit = part_unit(PART, FORMAT.bits)
        value = part_as_float(tile, PART, FORMAT.bits)
        if SCALED:
            scale = scale.to(tl.float32)
            return (value * (scale * unit) - (unit + zero) * scale).to(dtype)
        else:
            return (value * unit - (unit + zero)).to(dtype)
    else:
        value = tile
        if FORMAT.has_zero:
            value = value.to(tl.float32) - zero
        if SCALED:
            value = value.to(tl.float32) * scale.to(tl.float32)
        return widen_tile(value, dtype)


@triton.jit
def dot_part(
    acc,
    tile,
    x,
    part_scales,
    scale_ptr,
    zero_ptr,
    offs_n,
    in_n,
    group,
    stride_scale,
    stride_zero,
    PART: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_NUMBERS: tl.constexpr,
    LOAD_SCALES: tl.constexpr,
):
    """Return acc + W xᵀ over part PART of a tile, [BLOCK_N, BLOCK_M].

    tile: from `unpack_tile`; x: [BLOCK_M, BLOCK_K], of the weight's own type if that has 8 bits and
    inputs are quantized, too. A group's scale (of `part_scales`, from `load_part_scales`) is
    applied to the sums or, with SCALE_NUMBERS, to the numbers, which are then rounded; with
    LOAD_SCALES it is loaded here for that. If a row has one scale, the caller applies it. offs_n:
    rows of the weight in scale_ptr and zero_ptr.
    """
    dtype: tl.constexpr = x.dtype
    if dtype.primitive_bitwidth == 8:
        return tl.dot(tile, tl.trans(x), acc, out_dtype=acc.dtype)
    elif not FORMAT.quantized:
        return tl.dot(tile, tl.trans(x), acc, input_precision="ieee")
    else:
        zero = load_zero(zero_ptr, offs_n, in_n, group, stride_zero, FORMAT)
        if FORMAT.grouped and SCALE_NUMBERS:
            if LOAD_SCALES:
                scale = load_scale(scale_ptr, offs_n, in_n, group, stride_scale, FORMAT)
            else:
                scale = part_scales[PART][:, None]
            value = dequant_tile(tile, scale, zero, PART, dtype, FORMAT, True)
            return tl.dot(value, tl.trans(x), acc, input_precision="ieee")
        elif FORMAT.grouped:
            value = dequant_tile(tile, zero, zero, PART, dtype, FORMAT, False)
            product = tl.dot(value, tl.trans(x), input_precision="ieee")
            return acc + product * part_scales[PART].to(tl.float32)[:, None]
        else:
            value = dequant_tile(tile, zero, zero, PART, dtype, FORMAT, False)
            return tl.dot(value, tl.trans(x), acc, input_precision="ieee")
