"""RMSNorm, and the addition of a residual to it.

Memory: reads and writes num_rows * hidden_size elements once, plus the residual: bound by it. One
program per row, kept in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch
from .pdl import gdc_launch_dependents, gdc_wait, pdl_options


@triton.jit
def _rms_norm_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    residual_ptr,
    stride_out,
    stride_x,
    stride_residual,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < SIZE
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * stride_x + offsets, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    normed = (wide * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    out = normed.to(x.dtype)
    if RESIDUAL:
        residual = tl.load(residual_ptr + row * stride_residual + offsets, mask=mask, other=0.0)
        out = (residual.to(tl.float32) + out.to(tl.float32)).to(x.dtype)
    tl.store(out_ptr + row * stride_out + offsets, out, mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x: [..., hidden_size], last stride 1 → the same shape, contiguous.

    x / sqrt(mean(x²) + eps) in float32, rounded to the weight's type, times weight [hidden_size],
    which is of x's type or float32.
    Rounded to x's type; residual [num_rows, hidden_size], last stride 1, is added after that.
    The leading dims must be viewable as one; a slice of the last dim qualifies.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.view(-1, x.shape[-1]) if x.dim() != 2 else x
    num_rows, size = rows.shape
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(size)
    options = pdl_options(x.device)
    launch(_rms_norm_kernel, (num_rows,))(
        out,
        rows,
        weight,
        residual,
        size,
        rows.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        RESIDUAL=residual is not None,
        PDL=bool(options),
        num_warps=min(max(block // 512, 1), 16),
        **options,
    )
    return out
