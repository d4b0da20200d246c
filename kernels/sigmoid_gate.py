"""x times the sigmoid of a gate: of each element, or of one logit per row, computed here.

    out = x * sigmoid(gate)        or        out = x * sigmoid(gate · weight)
    out = x * silu(gate_factor gate) * out_factor

Memory: reads x and the gate and writes the result, once; each program of a row reads that row of
the gate for its logit. Bound by memory, or at few rows by the launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch
from .pdl import gdc_launch_dependents, gdc_wait, pdl_options

BLOCK = 1024


@triton.jit
def _sigmoid_gate_kernel(
    out_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    stride_x,
    stride_gate,
    gate_factor,
    out_factor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK elements of one row. WIDTH: of the weight; None: there is none."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < SIZE
    if WIDTH is not None:
        column = tl.arange(0, BLOCK_K)
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate_ptr += row * stride_gate
    x = tl.load(x_ptr + row * stride_x + offsets, mask=mask, other=0.0).to(tl.float32)
    if WIDTH is not None:
        gate = tl.load(gate_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        logit = tl.sum(gate * weight, axis=0)
    else:
        logit = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        logit *= gate_factor
        x *= logit * out_factor
    out = x / (1.0 + tl.exp(-logit))
    tl.store(out_ptr + row * SIZE + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def sigmoid_gate(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """x: [T, size]; gate: [T, size], or with weight, [1, width]: [T, width]; last strides 1 → [T,
    size], contiguous. In float32, rounded once."""
    return _gated(x, gate, weight)


def silu_gate(
    x: torch.Tensor, gate: torch.Tensor, gate_factor: float, out_factor: float
) -> torch.Tensor:
    """x, gate: [T, size], last strides 1 → [T, size], contiguous. In float32, rounded once."""
    return _gated(x, gate, None, (gate_factor, out_factor))


def _gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    factors: tuple[float, float] | None = None,
) -> torch.Tensor:
    num_rows, size = x.shape
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    width = None if weight is None else weight.shape[1]
    block = min(triton.next_power_of_2(size), BLOCK)
    options = pdl_options(x.device)
    launch(_sigmoid_gate_kernel, (num_rows, triton.cdiv(size, block)))(
        out, x, gate, weight, x.stride(0), gate.stride(0), *(factors or (1.0, 1.0)), SIZE=size,
        WIDTH=width, SILU=factors is not None, BLOCK=block,
        BLOCK_K=1 if width is None else triton.next_power_of_2(width), PDL=bool(options),
        num_warps=4, **options,
    )  # fmt: skip
    return out
