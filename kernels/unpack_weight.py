"""A quantized weight back to a dense one, for products of so many tokens that it pays.

Memory: reads rows * size * bits / 8 bytes and the scales, writes rows * size elements: a product of
some thousand tokens takes many times as long. About 4 operations an element: bound by memory.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .packed_weight import Packed, part_as_float, part_unit
from .rehearsal import launch

BLOCK_N, BLOCK_K = 8, 128


@triton.jit
def _unpack_weight_kernel(
    out_ptr,
    values_ptr,
    scale_ptr,
    zero_ptr,
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
    ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program BLOCK_N rows of BLOCK_K elements, all their parts."""
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    k = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    mask = (row < N) & (k < WIDTH)
    row64 = row.to(tl.int64)
    packed = tl.load(values_ptr + row64 * stride_values + k, mask=mask, other=0.0)
    for part in tl.static_range(PARTS):
        column = part * WIDTH + k
        group = column // GROUP_SIZE
        if PARTS == 1:
            value = packed.to(tl.float32)
        else:
            value = (part_as_float(packed, part, BITS) - 1.0) * part_unit(part, BITS)
        if ZERO:
            zero = tl.load(zero_ptr + group * stride_zero + row, mask=mask, other=0)
            value -= zero.to(tl.float32)
        else:
            value -= OFFSET
        scale_ptrs = scale_ptr + group * stride_scale + row // SCALE_ROWS
        value *= tl.load(scale_ptrs, mask=mask, other=0.0).to(tl.float32)
        target = out_ptr + row64 * (WIDTH * PARTS) + column
        tl.store(target, value.to(out_ptr.dtype.element_ty), mask=mask)


def unpack_weight(weight: Packed, dtype: torch.dtype) -> torch.Tensor:
    """→ [rows, size] of `dtype`, contiguous; computed in float32, rounded once."""
    rows, width = weight.values.shape
    out = torch.empty((rows, weight.size), dtype=dtype, device=weight.values.device)
    launch(_unpack_weight_kernel, (triton.cdiv(rows, BLOCK_N), triton.cdiv(width, BLOCK_K)))(
        out,
        weight.values,
        weight.scale,
        weight.zero,
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
        ZERO=weight.zero is not None,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=4,
    )
    return out
