"""Mamba's recurrence over rows of any lengths, in one launch.

    S[i, n] = exp(dt[i] a[i, n]) S[i, n] + dt[i] x[i] b[n]        y = (S c + d x) silu(gate)

One program holds the state of some channels of one row in registers, and walks over its tokens.

Memory: x, dt, gate and y once per token, a state once per row. About 6 N operations per element of
x, and as many steps one after another as the longest row has tokens: bound by their latency.
Source: Mamba (arXiv 2312.00752). Twin: `core.nn.state.operations.StateOperations.selective_scan`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from .rows import PLACES, Rows, row_of, softplus

CHANNELS = 32
"""Channels per program."""


@triton.jit(do_not_specialize_on_alignment=PLACES)
def _selective_scan_kernel(
    out_ptr,
    x_ptr,
    dt_ptr,
    b_ptr,
    c_ptr,
    gate_ptr,
    a_ptr,
    d_ptr,
    bias_ptr,
    state_ptr,
    query_start_ptr,
    seq_lens_ptr,
    slots_ptr,
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    stride_gate,
    low,
    high,
    size,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    start, count, slot, begins = row_of(tl.program_id(0), query_start_ptr, seq_lens_ptr, slots_ptr)
    if count == 0:
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    place = tl.arange(0, BLOCK_N)
    in_size, in_n = channel < size, place < N
    inside = in_size[:, None] & in_n[None, :]
    states = state_ptr + (slot * size + channel[:, None]) * N + place[None, :]
    state = tl.load(states, mask=inside & (begins == 0), other=0.0)
    a = tl.load(a_ptr + channel[:, None] * N + place[None, :], mask=inside, other=0.0)
    d = tl.load(d_ptr + channel, mask=in_size, other=0.0)
    bias = tl.load(bias_ptr + channel, mask=in_size, other=0.0)
    for at in range(0, count):
        token = start + at
        x = tl.load(x_ptr + token * stride_x + channel, mask=in_size, other=0.0).to(tl.float32)
        step = tl.load(dt_ptr + token * stride_dt + channel, mask=in_size, other=0.0)
        gate = tl.load(gate_ptr + token * stride_gate + channel, mask=in_size, other=0.0)
        b = tl.load(b_ptr + token * stride_b + place, mask=in_n, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + token * stride_c + place, mask=in_n, other=0.0).to(tl.float32)
        step = softplus(step.to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, low), high)
        state = state * tl.exp(step[:, None] * a) + (step * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], axis=1) + d * x
        gate = gate.to(tl.float32)
        y = y * gate / (1.0 + tl.exp(-gate))
        tl.store(out_ptr + token * size + channel, y.to(out_ptr.dtype.element_ty), mask=in_size)
    tl.store(states, state, mask=inside)


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    state: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """x, dt, gate: [T, I]; b, c: [T, N], last strides 1; a: [I, N], d, dt_bias: [I], float32,
    contiguous; state: [num_states, I, N] float32, contiguous, changed → [T, I]"""
    num_tokens, size = x.shape
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    states = b.shape[1]
    grid = (rows.slots.shape[0], triton.cdiv(size, CHANNELS))
    launch(_selective_scan_kernel, grid)(
        out, x, dt, b, c, gate, a, d, dt_bias, state, rows.query_start, rows.seq_lens, rows.slots,
        x.stride(0), dt.stride(0), b.stride(0), c.stride(0), gate.stride(0), *dt_limit, size,
        N=states, BLOCK_N=triton.next_power_of_2(states), CHANNELS=CHANNELS, num_warps=1,
    )  # fmt: skip
    return out
