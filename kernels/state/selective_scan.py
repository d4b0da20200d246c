"""Mamba's recurrence over rows of any lengths: one launch for those of one token, one for longer.

    S[i, n] = exp(dt[i] a[i, n]) S[i, n] + dt[i] x[i] b[n]        y = (S c + d x) silu(gate)

One program holds the state of some channels of one row in registers. Longer rows are computed in
tiles of some tokens: independent loads, step sizes and exponentials, then a scan in registers of
one thread, and sums over n. The next tile is loaded meanwhile.

Memory: x, dt, gate and y once per token, a state once per row: the bound of rows of one token.
Prompts are bound by the N exponentials per element of x and the instructions around them. Source:
Mamba (arXiv 2312.00752). Twin: `core.nn.state.operations.StateOperations.selective_scan`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from .rows import MOST_ROWS, PLACES, WHOLE, Rows, ScanWeights, longer_row, row_of, softplus

LOG2_E = tl.constexpr(1.4426950408889634)


class _Tiles(NamedTuple):
    channels: int
    tokens: int
    num_warps: int


LONGER = _Tiles(channels=32, tokens=4, num_warps=2)
"""Each warp has all channels, and some of their states."""
SINGLE_CHANNELS = 32
"""Channels per program, for rows of one token."""


@triton.jit
def _after(decay, added, next_decay, next_added):
    """Two steps of S = decay S + added in one."""
    return decay * next_decay, added * next_decay + next_added


@triton.jit
def _load_tile(
    x_ptr, dt_ptr, gate_ptr, b_ptr, c_ptr, stride_x, stride_dt, stride_gate, stride_b, stride_c,
    token, here, channel, in_size, place, in_n,
):  # fmt: skip
    at, inside = token[:, None], here[:, None] & in_size[None, :]
    in_b = here[:, None] & in_n[None, :]
    x = tl.load(x_ptr + at * stride_x + channel[None, :], mask=inside, other=0.0)
    dt = tl.load(dt_ptr + at * stride_dt + channel[None, :], mask=inside, other=0.0)
    gate = tl.load(gate_ptr + at * stride_gate + channel[None, :], mask=inside, other=0.0)
    b = tl.load(b_ptr + at * stride_b + place[None, :], mask=in_b, other=0.0)
    c = tl.load(c_ptr + at * stride_c + place[None, :], mask=in_b, other=0.0)
    return x, dt, gate, b, c


@triton.jit(do_not_specialize_on_alignment=PLACES)
def _selective_step_kernel(
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
    PDL: tl.constexpr,
):
    """One program: CHANNELS channels of one row, if it has one token."""
    start, count, slot, begins = row_of(tl.program_id(0), query_start_ptr, seq_lens_ptr, slots_ptr)
    if count != 1:
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    place = tl.arange(0, BLOCK_N)
    in_size, in_n = channel < size, place < N
    inside = in_size[:, None] & in_n[None, :]
    states = state_ptr + (slot * size + channel[:, None]) * N + place[None, :]
    state = tl.load(states, mask=inside & (begins == 0), other=0.0).to(tl.float32)
    a = tl.load(a_ptr + channel[:, None] * N + place[None, :], mask=inside, other=0.0)
    d = tl.load(d_ptr + channel, mask=in_size, other=0.0)
    bias = tl.load(bias_ptr + channel, mask=in_size, other=0.0)
    if PDL:
        # In a step of rows of one token nothing else writes their states.
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + start * stride_x + channel, mask=in_size, other=0.0).to(tl.float32)
    step = tl.load(dt_ptr + start * stride_dt + channel, mask=in_size, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + start * stride_gate + channel, mask=in_size, other=0.0)
    b = tl.load(b_ptr + start * stride_b + place, mask=in_n, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + start * stride_c + place, mask=in_n, other=0.0).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(step + bias), low), high)
    state = state * tl.exp(step[:, None] * a) + (step * x)[:, None] * b[None, :]
    y = tl.sum(state * c[None, :], axis=1) + d * x
    gate = gate.to(tl.float32)
    y = y * gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + start * size + channel, y.to(out_ptr.dtype.element_ty), mask=in_size)
    tl.store(states, state.to(state_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=PLACES)
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
    num_rows,
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
    TOKENS: tl.constexpr,
):
    """One program: CHANNELS channels of some rows of several tokens. Tiles are [BLOCK_N, CHANNELS],
    so that a warp's lanes are channels, and sums over n are sums of one thread's registers."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    place = tl.arange(0, BLOCK_N)
    at = tl.arange(0, TOKENS)
    in_size, in_n = channel < size, place < N
    inside = in_n[:, None] & in_size[None, :]
    a = tl.load(a_ptr + channel[None, :] * N + place[:, None], mask=inside, other=0.0) * LOG2_E
    d = tl.load(d_ptr + channel, mask=in_size, other=0.0)
    bias = tl.load(bias_ptr + channel, mask=in_size, other=0.0)
    index = tl.program_id(0)
    row, _, num_longer = longer_row(index, query_start_ptr, num_rows, WHOLE)
    while index < num_longer:
        start, count, slot, begins = row_of(row, query_start_ptr, seq_lens_ptr, slots_ptr)
        states = state_ptr + (slot * size + channel[None, :]) * N + place[:, None]
        state = tl.load(states, mask=inside & (begins == 0), other=0.0).to(tl.float32)
        x_row = x_ptr + start * stride_x
        dt_row = dt_ptr + start * stride_dt
        gate_row = gate_ptr + start * stride_gate
        b_row = b_ptr + start * stride_b
        c_row = c_ptr + start * stride_c
        xs, steps, gates, bs, cs = _load_tile(
            x_row, dt_row, gate_row, b_row, c_row,
            stride_x, stride_dt, stride_gate, stride_b, stride_c,
            at, at < count, channel, in_size, place, in_n,
        )  # fmt: skip
        for first in range(0, count, TOKENS):
            token = first + at
            here = token < count
            after = token + TOKENS
            next_xs, next_steps, next_gates, next_bs, next_cs = _load_tile(
                x_row, dt_row, gate_row, b_row, c_row,
                stride_x, stride_dt, stride_gate, stride_b, stride_c,
                after, after < count, channel, in_size, place, in_n,
            )  # fmt: skip
            wide = xs.to(tl.float32)
            # Selected, so that they are widened before each thread gets its copy, not behind that.
            in_b = here[:, None] & in_n[None, :]
            keys = tl.where(in_b, bs.to(tl.float32), 0.0)
            queries = tl.where(in_b, cs.to(tl.float32), 0.0)
            sizes = softplus(steps.to(tl.float32) + bias[None, :])
            # Tokens behind the row's end neither add nor decay.
            sizes = tl.where(here[:, None], tl.minimum(tl.maximum(sizes, low), high), 0.0)
            decay = tl.exp2(sizes[:, None, :] * a[None, :, :])
            added = (sizes * wide)[:, None, :] * keys[:, :, None]
            added = tl.where(at[:, None, None] == 0, added + decay * state[None, :, :], added)
            _decay, scanned = tl.associative_scan((decay, added), 0, _after)
            last = tl.where(at[:, None, None] == TOKENS - 1, scanned, 0.0)
            state = tl.sum(last, axis=0)
            ys = tl.sum(scanned * queries[:, :, None], axis=1) + d[None, :] * wide
            factor = gates.to(tl.float32)
            ys *= factor / (1.0 + tl.exp(-factor))
            tl.store(
                out_ptr + start * size + token[:, None] * size + channel[None, :],
                ys.to(out_ptr.dtype.element_ty), mask=here[:, None] & in_size[None, :],
            )  # fmt: skip
            xs, steps, gates, bs, cs = next_xs, next_steps, next_gates, next_bs, next_cs
        tl.store(states, state.to(state_ptr.dtype.element_ty), mask=inside)
        index += tl.num_programs(0)
        if index < num_longer:
            row, _, _ = longer_row(index, query_start_ptr, num_rows, WHOLE)


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    weights: ScanWeights,
    state: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """x, dt, gate: [T, I]; b, c: [T, N], last strides 1; weights: a [I, N], d, dt_bias [I],
    float32, contiguous, and dt_limit; state: [num_states, I, N], contiguous, changed → [T, I]"""
    num_tokens, size = x.shape
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    states = b.shape[1]
    num_rows, single = rows.slots.shape[0], rows.max_query_len == 1
    a, d, dt_bias, dt_limit = weights
    inputs = (out, x, dt, b, c, gate, a, d, dt_bias, state)
    places = (rows.query_start, rows.seq_lens, rows.slots)
    strides = (x.stride(0), dt.stride(0), b.stride(0), c.stride(0), gate.stride(0))
    block = triton.next_power_of_2(states)
    options = pdl_options(x.device) if single else {}
    launch(_selective_step_kernel, (num_rows, triton.cdiv(size, SINGLE_CHANNELS)))(
        *inputs, *places, *strides, *dt_limit, size, N=states, BLOCK_N=block,
        CHANNELS=SINGLE_CHANNELS, PDL=bool(options), num_warps=1, **options,
    )  # fmt: skip
    if not single:
        tiles = LONGER
        grid = (min(num_rows, MOST_ROWS), triton.cdiv(size, tiles.channels))
        launch(_selective_scan_kernel, grid)(
            *inputs, *places, num_rows, *strides, *dt_limit, size, N=states, BLOCK_N=block,
            CHANNELS=tiles.channels, TOKENS=tiles.tokens, num_warps=tiles.num_warps,
        )  # fmt: skip
    return out
