"""Epilogue of a library's product: adds partial sums, applies scales, bias and residual.

out = residual + (sum over SPLIT_K of partial) * row_scale * column_scale + bias

Memory: reads SPLIT_K * M * N elements of 4 bytes, and writes M * N; bound by it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch

BLOCK = 1024


@triton.jit
def _split_k_sum_kernel(
    out_ptr,
    partial_ptr,
    row_scale_ptr,
    column_scale_ptr,
    bias_ptr,
    residual_ptr,
    stride_split,
    N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK outputs of one row."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_n = offs_n < N
    offsets = row * N + offs_n
    acc = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLIT_K):
        partial = tl.load(partial_ptr + split * stride_split + offsets, mask=in_n, other=0)
        acc += partial.to(tl.float32)
    if SCALED:
        acc *= tl.load(row_scale_ptr + row)
        acc *= tl.load(column_scale_ptr + offs_n, mask=in_n, other=0.0).to(tl.float32)
    if BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=in_n, other=0.0).to(tl.float32)
    if RESIDUAL:
        acc += tl.load(residual_ptr + offsets, mask=in_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=in_n)


def split_k_sum(
    partial: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    row_scale: torch.Tensor | None = None,
    column_scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """partial: [SPLIT_K, M, N] float32 or int32 → out [M, N], which is returned.

    row_scale: [M] and column_scale: [N], both or neither; bias: [N]; residual: [M, N], perhaps
    `out` itself. All contiguous. Sums in float32, rounded once.
    """
    split_k, num_rows, outputs = partial.shape
    if num_rows == 0:
        return out
    block = min(triton.next_power_of_2(outputs), BLOCK)
    launch(_split_k_sum_kernel, (num_rows, triton.cdiv(outputs, block)))(
        out,
        partial,
        row_scale,
        column_scale,
        bias,
        residual,
        partial.stride(0),
        N=outputs,
        SPLIT_K=split_k,
        SCALED=row_scale is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out
