"""Activations: as functions of a kernel, and of gated layers over a fused gate-and-up projection.

    silu_mul: silu(gate) * up        gelu_mul: gelu(gate) * up, gelu by its tanh approximation
    xielu: without a gate, with weights of its own

Memory: reads 2 * num_rows * size elements (xielu half of that), writes num_rows * size: bound by
it. Sources: Gaussian error linear units (arXiv 1606.08415); xIELU (arXiv 2411.13010).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl

from .launch import launch
from .pdl import gdc_launch_dependents, gdc_wait, pdl_options


class Clamp(NamedTuple):
    """(up + 1) * gate * sigmoid(alpha * gate); gate is clamped from above, up on both sides."""

    alpha: float
    limit: float


class Limit(NamedTuple):
    """min(silu(gate), limit) * up; up is clamped on both sides."""

    limit: float


GatedActivation: TypeAlias = Clamp | Limit | Literal["gelu"]
"""In place of silu(gate) * up; "gelu": gelu(gate) * up."""


def gate_constants(activation: GatedActivation | None) -> dict[str, Any]:
    if isinstance(activation, Clamp):
        return {"ALPHA": activation.alpha, "LIMIT": activation.limit}
    if isinstance(activation, Limit):
        return {"ALPHA": None, "LIMIT": activation.limit}
    return {"ALPHA": activation, "LIMIT": None}


@triton.jit
def gated_product(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return silu(gate) * up, float32; with LIMIT alone, the formula of `Limit`; with a number
    ALPHA, the formula of `Clamp`; with "gelu", gelu(gate) * up. NaN propagates."""
    if ALPHA is None:
        gate = gate / (1.0 + tl.exp(-gate))
        if LIMIT is not None:
            gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return gate * up
    elif ALPHA == "gelu":
        return gelu_product(gate, up)
    else:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return (up + 1.0) * gate / (1.0 + tl.exp(-ALPHA * gate))


@triton.jit
def squared_relu(x):
    """Return relu(x)²."""
    x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return x * x


@triton.jit
def gelu_product(gate, up):
    # gate / 2 * (1 + tanh(inner)), where (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-2.0 * inner)) * up


ACTIVATIONS = {
    "gelu": "gelu", "gelu_fast": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2", "silu": "silu",
    "swish": "silu", "tanh": "tanh",
}  # fmt: skip
"""Name in configurations → name of `activated`."""


@triton.jit
def activated(x, NAME: tl.constexpr):
    """Return the activation NAME of x, float32; "": x."""
    if NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        return gelu_product(x, 1.0)
    elif NAME == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif NAME == "relu2":
        return squared_relu(x)
    elif NAME == "silu":
        return gated_product(x, 1.0, None, None)
    elif NAME == "tanh":
        return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))
    else:
        tl.static_assert(NAME == "")
        return x


@triton.jit
def _gated_activation_kernel(
    out_ptr,
    x_ptr,
    stride_out,
    stride_x,
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK elements of one row."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < SIZE
    gate = tl.load(x_ptr + row * stride_x + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + SIZE + offsets, mask=mask, other=0.0).to(tl.float32)
    out = gelu_product(gate, up) if GELU else gated_product(gate, up, None, None)
    tl.store(out_ptr + row * stride_out + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """x: [num_rows, 2 * size], gate then up, last stride 1 → [num_rows, size], contiguous."""
    return _gated_activation(x, gelu=False)


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    """As `silu_mul`, with gelu by its tanh approximation."""
    return _gated_activation(x, gelu=True)


def _gated_activation(x: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    num_rows, double = x.shape
    size = double // 2
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    block = min(triton.next_power_of_2(size), 1024)
    options = pdl_options(x.device)
    launch(_gated_activation_kernel, (num_rows, triton.cdiv(size, block)))(
        out, x, out.stride(0), x.stride(0), SIZE=size, GELU=gelu, BLOCK=block, PDL=bool(options),
        num_warps=4, **options,
    )  # fmt: skip
    return out


@triton.jit
def _xielu_kernel(out_ptr, x_ptr, weights_ptr, numel, BLOCK: tl.constexpr):
    """One program: BLOCK elements."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    positive = tl.load(weights_ptr)
    negative = tl.load(weights_ptr + 1)
    beta = tl.load(weights_ptr + 2)
    eps = tl.load(weights_ptr + 3)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    low = tl.minimum(x, eps, propagate_nan=tl.PropagateNan.ALL)
    # exp(low) - 1, by its series where the difference would cancel.
    series = low * (1.0 + low * (0.5 + low * (1.0 / 6.0)))
    grown = tl.where(tl.abs(low) < 0.01, series, tl.exp(low) - 1.0)
    out = beta * x + tl.where(x > 0, positive * x * x, negative * (grown - x))
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def xielu(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x: [any] → the same shape; weights: [4] float32: of x² above 0, of expm1(min(x,
    eps)) - x elsewhere, of x everywhere, and eps.

    Computed in float32, rounded once at the end.
    """
    x, block = x.contiguous(), 1024
    out = torch.empty_like(x)
    if x.numel():
        launch(_xielu_kernel, (triton.cdiv(x.numel(), block),))(
            out, x, weights, x.numel(), BLOCK=block, num_warps=4
        )
    return out
