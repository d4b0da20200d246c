"""Several tokens through a quantized linear layer: dequantised tile by tile, on the matrix unit.

Numbers become x's type exactly; a group's scale is applied to the tile's float32 product. Few
tokens leave few programs: then the columns are cut as well (split-K), into partial sums that
finish_product.py adds up.

Memory: the packed weight once for each BLOCK_M tokens, x once for each BLOCK_N outputs (from the L2
cache); split, 4 bytes an output and split, written and read. Operations: 2 * tokens * rows * size.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .finish_product import finish_product
from .packed_weight import Packed, largest_tile, part_as_float, part_unit
from .rehearsal import launch

MAX_SPLITS = 8
SMALLEST_TILE = 16
"""Columns that the matrix unit takes at least."""


@triton.jit
def _packed_matmul_kernel(
    out_ptr,
    x_ptr,
    values_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    num_tokens,
    stride_split,
    stride_x,
    stride_values,
    stride_scale,
    stride_zero,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUPED: tl.constexpr,
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program BLOCK_M tokens, BLOCK_N outputs and one of SPLITS runs of tiles."""
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    in_m = token < num_tokens
    in_n = row < N
    TILES: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    PER_SPLIT: tl.constexpr = (TILES + SPLITS - 1) // SPLITS
    EVEN_K: tl.constexpr = WIDTH % BLOCK_K == 0
    dtype = x_ptr.dtype.element_ty
    values = values_ptr + row.to(tl.int64)[:, None] * stride_values + k[None, :]
    x_ptrs = x_ptr + token.to(tl.int64)[:, None] * stride_x + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in range(split * PER_SPLIT, tl.minimum((split + 1) * PER_SPLIT, TILES)):
        start = tile * BLOCK_K
        in_k = start + k < WIDTH
        mask = in_n[:, None] & in_k[None, :]
        packed = tl.load(values + start, mask=mask, other=0.0)
        for part in tl.static_range(PARTS):
            column = part * WIDTH + start
            mask_x = in_m[:, None]
            if not EVEN_K:
                mask_x = mask_x & in_k[None, :]
            x = tl.load(x_ptrs + column, mask=mask_x, other=0.0)
            if ZERO:
                group = column // GROUP_SIZE
                zero = tl.load(zero_ptr + group * stride_zero + row, mask=in_n, other=0)
                zero = zero.to(tl.float32)[:, None]
            else:
                zero = OFFSET
            if PARTS == 1:
                value = packed.to(tl.float32) - zero
            else:
                # Of unit + number: take off the unit and the zero together.
                unit = part_unit(part, BITS)
                value = part_as_float(packed, part, BITS) * unit - (unit + zero)
            product = tl.dot(x, tl.trans(value.to(dtype)), input_precision="ieee")
            if GROUPED:
                scale_ptrs = scale_ptr + (column // GROUP_SIZE) * stride_scale + row // SCALE_ROWS
                scale = tl.load(scale_ptrs, mask=in_n, other=0.0).to(tl.float32)
                product *= scale[None, :]
            acc += product
    if not GROUPED:
        scale = tl.load(scale_ptr + row // SCALE_ROWS, mask=in_n, other=0.0).to(tl.float32)
        acc *= scale[None, :]
    target = token.to(tl.int64)[:, None] * N + row[None, :]
    mask = in_m[:, None] & in_n[None, :]
    if SPLITS > 1:
        tl.store(out_ptr + split.to(tl.int64) * stride_split + target, acc, mask=mask)
        return
    if BIAS:
        acc += tl.load(bias_ptr + row, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        acc += tl.load(residual_ptr + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=mask)


class PackedMatmulShape(NamedTuple):
    """How the work is cut."""

    block_m: int
    block_n: int
    block_k: int
    """Elements of a row (bytes, or words) at a time, at most"""
    splits: int
    num_warps: int
    num_stages: int


def packed_matmul_shape(
    num_tokens: int, rows: int, width: int, words: bool, num_sms: int
) -> PackedMatmulShape:
    """For [num_tokens] inputs and `rows` outputs of `width` elements each.

    Not swept yet: cut so that tiles in flight fit a multiprocessor's shared memory, twice where
    tokens are few.
    """
    block_m = min(max(triton.next_power_of_2(num_tokens), 16), 64)
    few = block_m == 16
    block_n = 32 if few else 64
    if words:
        block_k, num_stages = (64, 4) if few else (32, 3)
    else:
        block_k, num_stages = (256, 4) if few else (128, 4)
    programs = triton.cdiv(rows, block_n) * triton.cdiv(num_tokens, block_m)
    splits = min(max(num_sms // programs, 1), MAX_SPLITS, max(width // (4 * block_k), 1))
    return PackedMatmulShape(block_m, block_n, block_k, splits, 4, num_stages)


def packed_matmul(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    num_sms: int = 132,
    shape: PackedMatmulShape | None = None,
) -> torch.Tensor:
    """x: [num_tokens, size], last stride 1; weight: of [rows, size] → [num_tokens, rows] of x's
    type.

    bias: [rows]; residual: [num_tokens, rows], contiguous. Raises ValueError where the groups are
    too narrow for the matrix unit (`packed_matmul_serves`).
    """
    num_tokens = x.shape[0]
    rows, width = weight.values.shape
    shape = shape or packed_matmul_shape(num_tokens, rows, width, weight.parts > 1, num_sms)
    block_k = largest_tile(weight, shape.block_k)
    if not weight.grouped:
        block_k = max(block_k, SMALLEST_TILE)
    if block_k < SMALLEST_TILE:
        raise ValueError(f"groups of {weight.group_size} leave tiles of {block_k} columns")
    splits = shape.splits
    out = torch.empty((num_tokens, rows), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    partial = out
    if splits > 1:
        partial = torch.empty((splits, num_tokens, rows), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, shape.block_n), triton.cdiv(num_tokens, shape.block_m), splits)
    launch(_packed_matmul_kernel, grid)(
        partial,
        x,
        weight.values,
        weight.scale,
        weight.zero,
        bias,
        residual,
        num_tokens,
        num_tokens * rows,
        x.stride(0),
        weight.values.stride(0),
        weight.scale.stride(0),
        0 if weight.zero is None else weight.zero.stride(0),
        N=rows,
        WIDTH=width,
        PARTS=weight.parts,
        BITS=weight.bits,
        GROUP_SIZE=weight.group_size,
        SCALE_ROWS=weight.scale_rows,
        OFFSET=weight.offset,
        GROUPED=weight.grouped,
        ZERO=weight.zero is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        SPLITS=splits,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=block_k,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if splits > 1:
        finish_product(partial, out, bias, residual=residual)
    return out


def packed_matmul_serves(weight: Packed) -> bool:
    """Whether the weight's groups are wide enough."""
    return not weight.grouped or largest_tile(weight, SMALLEST_TILE) >= SMALLEST_TILE
