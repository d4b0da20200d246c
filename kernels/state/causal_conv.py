"""Convolution of each channel over a sequence's tokens, which continue the inputs in its state.

    y[t] = Σ_k weight[k] x[t - K + 1 + k] + bias, optionally silu

Memory: reads x and writes y once (an input is read K times, but by one program); the state of each
row is read and written once. Bound by memory. A step of one token per row is one launch; otherwise
outputs come first, because they read the states that a second launch replaces. Twin:
`core.nn.state.operations.StateOperations.causal_conv`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from ..step.step_inputs import rows_of
from .rows import PLACES, Rows, row_of

TOKENS = 16
CHANNELS = 128


@triton.jit
def _activated(x, SILU: tl.constexpr):
    return x / (1.0 + tl.exp(-x)) if SILU else x


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=PLACES)
def _conv_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    query_start_ptr,
    seq_lens_ptr,
    slots_ptr,
    num_rows,
    num_tokens,
    stride_x,
    size,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One program: TOKENS tokens of CHANNELS channels; reads the states only."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = token < num_tokens
    in_size = channel < size
    row = rows_of(query_start_ptr, token, num_rows, TOKENS)
    start = tl.load(query_start_ptr + row)
    count = tl.load(query_start_ptr + row + 1) - start
    slot = tl.load(slots_ptr + row).to(tl.int64)
    continues = tl.load(seq_lens_ptr + row) != count
    place = token - start
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + channel, mask=in_size, other=0.0).to(tl.float32)[None, :]
    weights = weight_ptr + channel * K
    sources = x_ptr + token.to(tl.int64)[:, None] * stride_x + channel[None, :]
    for k in tl.static_range(K):
        lag = K - 1 - k
        weight = tl.load(weights + k, mask=in_size, other=0.0).to(tl.float32)
        here = inside & (place >= lag)
        x = tl.load(sources - lag * stride_x, mask=here[:, None] & in_size[None, :], other=0.0)
        total += weight[None, :] * x.to(tl.float32)
    # Few programs have a row's first tokens.
    early = inside & (place < K - 1) & continues
    if tl.max(early.to(tl.int32), axis=0) > 0:
        for k in tl.static_range(K - 1):
            lag = K - 1 - k
            weight = tl.load(weights + k, mask=in_size, other=0.0).to(tl.float32)
            before = early & (place < lag)
            kept = (slot * (K - 1) + K - 1 + place - lag) * size
            old = tl.load(
                state_ptr + kept[:, None] + channel[None, :],
                mask=before[:, None] & in_size[None, :], other=0.0,
            )  # fmt: skip
            total += weight[None, :] * old.to(tl.float32)
    out = _activated(total, SILU)
    tl.store(
        out_ptr + token.to(tl.int64)[:, None] * size + channel[None, :],
        out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & in_size[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=PLACES)
def _conv_state_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    query_start_ptr,
    seq_lens_ptr,
    slots_ptr,
    stride_x,
    size,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    SINGLE: tl.constexpr,
    CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the state of one row, CHANNELS channels; with SINGLE also its one output."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    in_size = channel < size
    start, count, slot, begins = row_of(row, query_start_ptr, seq_lens_ptr, slots_ptr)
    states = state_ptr + slot * (K - 1) * size + channel
    inputs = x_ptr + channel
    if SINGLE:
        if PDL:
            gdc_launch_dependents()
        total = tl.zeros([CHANNELS], tl.float32)
        if BIAS:
            total += tl.load(bias_ptr + channel, mask=in_size, other=0.0).to(tl.float32)
        last = tl.load(weight_ptr + channel * K + K - 1, mask=in_size, other=0.0)
        kept = ()
        for k in tl.static_range(K - 1):
            weight = tl.load(weight_ptr + channel * K + k, mask=in_size, other=0.0)
            old = tl.load(states + k * size, mask=in_size & (begins == 0), other=0.0)
            total += weight.to(tl.float32) * old.to(tl.float32)
            kept = kept + (old,)  # type: ignore[assignment]  # noqa: RUF005
        if PDL:
            # In a step of such rows nothing else writes their states.
            gdc_wait()
        new = tl.load(inputs + start * stride_x, mask=in_size, other=0.0).to(tl.float32)
        total += last.to(tl.float32) * new
        for k in tl.static_range(K - 2):
            tl.store(states + k * size, kept[k + 1], mask=in_size)
        tl.store(states + (K - 2) * size, new.to(state_ptr.dtype.element_ty), mask=in_size)
        out = _activated(total, SILU)
        tl.store(out_ptr + start * size + channel, out.to(out_ptr.dtype.element_ty), mask=in_size)
    elif count > 0:
        # Entries move to the front: none is written before it is read.
        for k in tl.static_range(K - 1):
            place = count - (K - 1) + k
            from_state = in_size & (place < 0) & (begins == 0)
            old = tl.load(states + (K - 1 + place) * size, mask=from_state, other=0.0)
            source = (start + place) * stride_x
            x = tl.load(inputs + source, mask=in_size & (place >= 0), other=0.0)
            value = x.to(tl.float32) + old.to(tl.float32)
            tl.store(states + k * size, value.to(state_ptr.dtype.element_ty), mask=in_size)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: Rows,
    *,
    silu: bool,
) -> torch.Tensor:
    """x: [T, C], last stride 1; weight: [C, K], bias: [C], contiguous; state: [num_states, K - 1,
    C], contiguous, changed → [T, C]"""
    num_tokens, size = x.shape
    num_rows, kernel = rows.slots.shape[0], weight.shape[1]
    single = rows.max_query_len == 1
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    places = (rows.query_start, rows.seq_lens, rows.slots)
    programs = triton.cdiv(size, CHANNELS)
    if not single:
        launch(_conv_kernel, (triton.cdiv(num_tokens, TOKENS), programs))(
            out, x, weight, bias, state, *places, num_rows, num_tokens, x.stride(0), size,
            K=kernel, BIAS=bias is not None, SILU=silu, TOKENS=TOKENS, CHANNELS=CHANNELS,
            num_warps=4,
        )  # fmt: skip
    options = pdl_options(x.device) if single else {}
    launch(_conv_state_kernel, (num_rows, programs))(
        out, x, weight, bias, state, *places, x.stride(0), size,
        K=kernel, BIAS=bias is not None, SILU=silu, SINGLE=single, CHANNELS=CHANNELS,
        PDL=bool(options), num_warps=1, **options,
    )  # fmt: skip
    return out
