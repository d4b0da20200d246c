"""Quantization of rows to fp8 or int8 with one scale per row, and the RMSNorm before it.

Memory: reads num_rows * size elements once, writes as many bytes and a float32 per row: bound by
it. One program per row, kept in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@triton.jit
def _quantize_rows_kernel(
    out_ptr,
    scale_ptr,
    x_ptr,
    norm_ptr,
    given_ptr,
    eps,
    stride_x,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    NORM: tl.constexpr,
    GIVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < SIZE
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + row * stride_x + offsets, mask=mask, other=0.0)
    if PDL:
        gdc_launch_dependents()
    wide = x.to(tl.float32)
    if NORM:
        wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
        # Rounded where the plain norm rounds, so that both see the same numbers.
        weight = tl.load(norm_ptr + offsets, mask=mask, other=0.0)
        wide = wide.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
        wide = wide.to(x.dtype).to(tl.float32)
    if GIVEN:
        scale = tl.load(given_ptr).to(tl.float32)
    else:
        largest = tl.max(tl.abs(wide), axis=0)
        scale = tl.where(largest > 0.0, largest / LARGEST, 1.0)
    scaled = tl.minimum(tl.maximum(wide / scale, -LARGEST), LARGEST)
    if out_ptr.dtype.element_ty == tl.int8:
        # Halves away from zero: a conversion to an integer cuts.
        scaled += tl.where(scaled >= 0.0, 0.5, -0.5)
    tl.store(out_ptr + row * SIZE + offsets, scaled.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row, scale)


def quantize_rows(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [num_rows, size], last stride 1 → ([num_rows, size] of `dtype`, [num_rows] float32).

    dtype: float8_e4m3fn or int8. norm: (weight [size], eps). scale: [1] float32 for all rows
    (values beyond it are clamped); None: each row's own, from its largest magnitude.
    """
    num_rows, size = x.shape
    out = torch.empty((num_rows, size), dtype=dtype, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return out, scales
    block = triton.next_power_of_2(size)
    options = pdl_options(x.device)
    launch(_quantize_rows_kernel, (num_rows,))(
        out,
        scales,
        x,
        None if norm is None else norm[0],
        scale,
        0.0 if norm is None else norm[1],
        x.stride(0),
        SIZE=size,
        BLOCK=block,
        LARGEST=LARGEST[dtype],
        NORM=norm is not None,
        GIVEN=scale is not None,
        PDL=bool(options),
        num_warps=min(max(block // 512, 1), 16),
        **options,
    )
    return out, scales
