"""One token of each row through Mamba 2, between its two projections, in one launch.

    x, B, C = silu(conv(projected))     S = exp(dt a) S + dt x Bᵀ     y = (S C + d x) silu(gate)

One program computes some channels of one head of one row. The convolution's inputs are few, so the
programs of a group of heads each convolve that group's keys and queries (B and C) again; whichever
of them comes last stores their new inputs, when all have read the old ones.

Memory: a row's state read and written once, 8 P N bytes per head in float32, is nearly all, and the
bound. With one row that takes as long as a launch does. So a program loads the state, and all else
that the kernel before it does not write, before it waits for that one (`pdl`).

Source: Mamba 2 (arXiv 2405.21060). Twin: `core.nn.state.operations.StateOperations.mamba2`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from .conv_step import convolved, kept_inputs, store_inputs
from .rows import PLACES, Rows, softplus


class StepConfig(NamedTuple):
    """Tiles of a step of one token per row."""

    channels: int
    """Channels of a head per program."""
    num_warps: int


@triton.jit(do_not_specialize_on_alignment=PLACES)
def _mamba2_step_kernel(
    out_ptr,
    projected_ptr,
    conv_weight_ptr,
    conv_bias_ptr,
    inputs_ptr,
    a_ptr,
    d_ptr,
    bias_ptr,
    state_ptr,
    counter_ptr,
    seq_lens_ptr,
    slots_ptr,
    stride_projected,
    low,
    high,
    gate_factor,
    step_factor,
    out_factor,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    TAPS: tl.constexpr,
    CONV_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_P channels of one head of one row. inputs_ptr: the convolution's state."""
    INNER: tl.constexpr = HEADS * P
    SIZE: tl.constexpr = INNER + 2 * GROUPS * N
    PROGRAMS: tl.constexpr = HEADS // GROUPS * ((P + BLOCK_P - 1) // BLOCK_P)
    row = tl.program_id(0)
    head = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    continues = tl.load(seq_lens_ptr + row) != 1
    group = head // (HEADS // GROUPS)
    place = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    number = tl.arange(0, BLOCK_N)
    in_p, in_n = place < P, number < N
    inside = in_p[:, None] & in_n[None, :]
    channel = head * P + place
    key = INNER + group * N + number
    query = key + GROUPS * N
    states = state_ptr + ((slot * HEADS + head) * P + place[:, None]) * N + number[None, :]
    state = tl.load(states, mask=inside & continues, other=0.0).to(tl.float32)
    inputs_ptr += slot * (TAPS - 1) * SIZE
    x_sum, x_last, x_kept = kept_inputs(
        inputs_ptr, conv_weight_ptr, conv_bias_ptr, channel, in_p, continues, SIZE, TAPS, CONV_BIAS
    )
    key_sum, key_last, key_kept = kept_inputs(
        inputs_ptr, conv_weight_ptr, conv_bias_ptr, key, in_n, continues, SIZE, TAPS, CONV_BIAS
    )
    query_sum, query_last, query_kept = kept_inputs(
        inputs_ptr, conv_weight_ptr, conv_bias_ptr, query, in_n, continues, SIZE, TAPS, CONV_BIAS
    )
    a = tl.load(a_ptr + head)
    d = tl.load(d_ptr + head)
    bias = tl.load(bias_ptr + head)
    if PDL:
        gdc_wait()
    projected_ptr += row.to(tl.int64) * stride_projected
    new_x = tl.load(projected_ptr + INNER + channel, mask=in_p, other=0.0)
    new_key = tl.load(projected_ptr + INNER + key, mask=in_n, other=0.0)
    new_query = tl.load(projected_ptr + INNER + query, mask=in_n, other=0.0)
    step = tl.load(projected_ptr + INNER + SIZE + head).to(tl.float32)
    if GATED:
        gate = tl.load(projected_ptr + channel, mask=in_p, other=0.0).to(tl.float32)
    if SCALED:
        # Rounded as in longer rows.
        step = (step * step_factor).to(projected_ptr.dtype.element_ty).to(tl.float32)
        if GATED:
            gate *= gate_factor
    x = convolved(x_sum, x_last, new_x)
    keys = convolved(key_sum, key_last, new_key)
    queries = convolved(query_sum, query_last, new_query)
    last = True
    if PROGRAMS > 1:
        # What is behind the barrier comes after all of this program's reads of old inputs; before
        # the state is stored, so that the counter need not wait for that.
        tl.debug_barrier()
        counter = counter_ptr + row * GROUPS + group
        last = tl.atomic_add(counter, 1, sem="acq_rel") == PROGRAMS - 1
    step = tl.minimum(tl.maximum(softplus(step + bias), low), high)
    state = state * tl.exp(step * a) + (x * step)[:, None] * keys[None, :]
    y = tl.sum(state * queries[None, :], axis=1) + d * x
    if GATED:
        y *= gate / (1.0 + tl.exp(-gate))
        if SCALED:
            y *= out_factor
    out = out_ptr + row.to(tl.int64) * INNER + channel
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=in_p)
    tl.store(states, state.to(state_ptr.dtype.element_ty), mask=inside)
    store_inputs(inputs_ptr, x_kept, new_x, channel, in_p, SIZE, TAPS)
    if last:
        if PROGRAMS > 1:
            tl.store(counter, 0)
        store_inputs(inputs_ptr, key_kept, new_key, key, in_n, SIZE, TAPS)
        store_inputs(inputs_ptr, query_kept, new_query, query, in_n, SIZE, TAPS)


def step_config(num_rows: int, heads: int, width: int, states: int) -> StepConfig:
    """Return the tiles for `num_rows` states of [heads, width, states].

    Measured on an H200 with the layers of Mamba 2 2.7B, Falcon-H1 1.5B, Bamba and Nemotron-H 8B.
    """
    most = 8 if num_rows == 1 else max(1, 4096 // triton.next_power_of_2(states))
    return StepConfig(min(triton.next_power_of_2(width), most), 4)


def mamba2_step(
    projected: torch.Tensor,
    weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    inputs: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    state: torch.Tensor,
    rows: Rows,
    counters: torch.Tensor,
    *,
    groups: int,
    gated: bool,
    factors: tuple[float, float, float] | None = None,
    config: StepConfig | None = None,
) -> torch.Tensor:
    """projected: [R, H P + (H P + 2 G N) + H], gate, inputs of the convolution (x, B and C) and
    step sizes, last stride 1; weight: [H P + 2 G N, K], conv_bias: [H P + 2 G N], contiguous;
    inputs: [num_states, K - 1, H P + 2 G N] and state: [num_states, H, P, N], contiguous, changed;
    a, d, dt_bias: [H] float32; counters: [at least R G] int32, zeros before and after; `rows` have
    one token each; factors: of gate, step sizes, and of the gated result → [R, H P]"""
    num_rows = projected.shape[0]
    heads, width, states = state.shape[1:]
    if not rows.single or counters.numel() < num_rows * groups:
        raise ValueError(f"{num_rows} rows of one token each, and as many counters per group")
    config = config or step_config(num_rows, heads, width, states)
    out = torch.empty((num_rows, heads * width), dtype=projected.dtype, device=projected.device)
    options = pdl_options(projected.device)
    launch(_mamba2_step_kernel, (num_rows, heads, triton.cdiv(width, config.channels)))(
        out, projected, weight, conv_bias, inputs, a, d, dt_bias, state, counters,
        rows.seq_lens, rows.slots, projected.stride(0), *dt_limit,
        *(factors or (1.0, 1.0, 1.0)),
        HEADS=heads, GROUPS=groups, P=width, N=states, TAPS=weight.shape[1],
        CONV_BIAS=conv_bias is not None, GATED=gated,
        SCALED=factors is not None, BLOCK_P=config.channels,
        BLOCK_N=triton.next_power_of_2(states), PDL=bool(options), num_warps=config.num_warps,
        **options,
    )  # fmt: skip
    return out
