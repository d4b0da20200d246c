"""The gated MLP's other activation: gelu(gate) * up over one fused projection, gelu by tanh.

Memory: reads 2 * num_rows * size elements, writes num_rows * size. About 12 operations an element:
bound by memory. Source: Gaussian error linear units (arXiv 1606.08415).
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .silu_mul import gated_mul


@triton.jit
def _gelu_mul_kernel(out_ptr, x_ptr, stride_out, stride_x, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < SIZE
    gate = tl.load(x_ptr + row * stride_x + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + SIZE + offsets, mask=mask, other=0.0).to(tl.float32)
    # gate / 2 * (1 + tanh(inner)), where (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    out = gate / (1.0 + tl.exp(-2.0 * inner)) * up
    tl.store(out_ptr + row * stride_out + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """x: [num_rows, 2 * size], gate then up, last stride 1 → [num_rows, size], contiguous.

    Computed in float32, rounded once at the end.
    """
    return gated_mul(_gelu_mul_kernel, x)
