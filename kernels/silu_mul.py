"""The gated MLP's activation: silu(gate) * up over one fused projection.

Memory: reads 2 * num_rows * size elements, writes num_rows * size. About 6 operations an element:
bound by memory.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .rehearsal import launch


@triton.jit
def _silu_mul_kernel(out_ptr, x_ptr, stride_out, stride_x, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < SIZE
    gate = tl.load(x_ptr + row * stride_x + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + SIZE + offsets, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * stride_out + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """x: [num_rows, 2 * size], gate then up, last stride 1 → [num_rows, size], contiguous.

    Computed in float32, rounded once at the end.
    """
    return gated_mul(_silu_mul_kernel, x)


def gated_mul(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    """As `silu_mul`, by a kernel of its arguments."""
    num_rows, double = x.shape
    size = double // 2
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    block = min(triton.next_power_of_2(size), 1024)
    launch(kernel, (num_rows, triton.cdiv(size, block)))(
        out, x, out.stride(0), x.stride(0), SIZE=size, BLOCK=block, num_warps=4
    )
    return out
