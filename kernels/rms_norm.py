"""RMSNorm, alone and fused with the residual addition before it.

Memory: rms_norm reads and writes num_rows * hidden_size elements once; fused_add_rms_norm reads
and writes two of them. About 4 operations an element: bound by memory. One program a row, which
it holds in registers, so a row is read once.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    out_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    stride_out,
    stride_x,
    stride_residual,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < SIZE
    x = tl.load(x_ptr + row * stride_x + offsets, mask=mask, other=0.0)
    if ADD:
        residual_ptrs = residual_ptr + row * stride_residual + offsets
        residual = tl.load(residual_ptrs, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptrs, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * weight
    tl.store(out_ptr + row * stride_out + offsets, normed.to(x.dtype), mask=mask)


def _launch(
    out: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    add: bool,
) -> None:
    num_rows, size = x.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(num_rows,)](
        out,
        x,
        residual,
        weight,
        out.stride(0),
        x.stride(0),
        residual.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        ADD=add,
        num_warps=min(max(block // 512, 1), 16),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., hidden_size], last stride 1 → the same shape, contiguous.

    x / sqrt(mean(x²) + eps) in float32, rounded to x's type, times weight [hidden_size].
    The leading dims must be viewable as one; a slice of the last dim qualifies.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.view(-1, x.shape[-1]) if x.dim() != 2 else x
    _launch(out.view(-1, x.shape[-1]), rows, rows, weight, eps, add=False)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """In place: residual = x + residual, x = rms_norm(residual).

    x, residual: [num_rows, hidden_size] of one type, last stride 1; weight: [hidden_size].
    """
    _launch(x, x, residual, weight, eps, add=True)
