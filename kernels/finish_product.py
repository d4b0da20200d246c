"""What follows a product whose sums are not done: add partial sums, scale, bias, residual.

    out = residual + (sum over splits of part) * row_scale * column_scale + bias

Memory: reads splits * num_rows * size elements of 4 bytes, and writes num_rows * size; bound by it.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rehearsal import launch

BLOCK = 1024


@triton.jit
def _finish_product_kernel(
    out_ptr,
    part_ptr,
    row_scale_ptr,
    column_scale_ptr,
    bias_ptr,
    residual_ptr,
    stride_split,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program BLOCK outputs of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    at = row * N + column
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        part = tl.load(part_ptr + split * stride_split + at, mask=mask, other=0)
        total += part.to(tl.float32)
    if SCALED:
        total *= tl.load(row_scale_ptr + row)
        total *= tl.load(column_scale_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


def finish_product(
    parts: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    row_scale: torch.Tensor | None = None,
    column_scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """parts: [splits, num_rows, size] float32 or int32 → out [num_rows, size], which is returned.

    row_scale: [num_rows] and column_scale: [size], both or neither; bias: [size]; residual:
    [num_rows, size], perhaps `out` itself. All contiguous. Sums in float32, rounded once.
    """
    splits, num_rows, size = parts.shape
    if num_rows == 0:
        return out
    block = min(triton.next_power_of_2(size), BLOCK)
    launch(_finish_product_kernel, (num_rows, triton.cdiv(size, block)))(
        out,
        parts,
        row_scale,
        column_scale,
        bias,
        residual,
        parts.stride(0),
        N=size,
        SPLITS=splits,
        SCALED=row_scale is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out
