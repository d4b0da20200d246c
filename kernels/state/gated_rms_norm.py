"""RMSNorm of groups of channels, times silu(gate) before or after it, or sigmoid(gate) after it.

Memory: reads x and gate and writes the result, once: bound by it. Twin:
`core.nn.state.operations.StateOperations.gated_rms_norm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options


@triton.jit
def _gated_rms_norm_kernel(
    out_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    stride_x,
    stride_gate,
    size,
    eps,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one group of one token."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mask = place < GROUP
    channel = tl.program_id(1) * GROUP + place
    weight = tl.load(weight_ptr + (place if SHARED else channel), mask=mask, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + token * stride_x + channel, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + token * stride_gate + channel, mask=mask, other=0.0).to(tl.float32)
    factor = (1.0 if SIGMOID else gate) / (1.0 + tl.exp(-gate))
    wide = x.to(tl.float32)
    if GATE_FIRST:
        wide *= factor
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=0) / GROUP + eps)
    # Rounded before the weight, as models were trained; with a sigmoid, only behind the gate.
    if not SIGMOID:
        wide = wide.to(x.dtype).to(tl.float32)
    normed = wide * weight.to(tl.float32)
    if not SIGMOID:
        normed = normed.to(x.dtype).to(tl.float32)
    if not GATE_FIRST:
        normed *= factor
    tl.store(out_ptr + token * size + channel, normed.to(x.dtype), mask=mask)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    group_size: int,
    gate_first: bool,
    sigmoid: bool = False,
) -> torch.Tensor:
    """x, gate: [T, size], last stride 1; weight: [size], or [group_size] for all groups → [T,
    size]"""
    num_tokens, size = x.shape
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(group_size)
    options = pdl_options(x.device)
    launch(_gated_rms_norm_kernel, (num_tokens, size // group_size))(
        out, x, gate, weight, x.stride(0), gate.stride(0), size, eps,
        GROUP=group_size, SHARED=weight.shape[0] == group_size, GATE_FIRST=gate_first,
        SIGMOID=sigmoid, BLOCK=block, PDL=bool(options),
        num_warps=min(16, max(1, block // 512)), **options,
    )  # fmt: skip
    return out
