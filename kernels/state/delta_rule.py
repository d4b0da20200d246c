"""Gated delta rule over rows of any lengths.

    S = exp(rate softplus(step + bias)) S        S += k (sigmoid(beta) (v - Sᵀ k))ᵀ
    y = Sᵀ q / sqrt(K), with queries and keys divided by their lengths first

One program holds the state of one row and head (for some of its values) in registers. Rows of one
token are computed as above, by small programs. Longer ones are computed chunk by chunk from
`delta_chunks`' results: four dependent products of tiles per chunk.

Memory: queries, keys, values and outputs once per token (queries and keys by each program of a
head), a state once per row: the bound of rows of one token. Of prompts also what `delta_chunks`
writes; one row of a prompt is bound by the latency of its chunks one after another, several by the
L2 cache. Source: gated delta networks (arXiv 2412.06464). Twin:
`core.nn.state.operations.StateOperations.delta_rule`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from .delta_chunks import delta_chunks
from .rows import MOST_ROWS, PLACES, Rows, log_decay, long_row, row_of


class _Tiles(NamedTuple):
    values: int
    chunk: int
    precision: str
    num_warps: int
    num_stages: int
    chunk_warps: int


NARROW = _Tiles(values=32, chunk=64, precision="tf32", num_warps=4, num_stages=3, chunk_warps=4)
WIDE = _Tiles(values=16, chunk=16, precision="ieee", num_warps=8, num_stages=1, chunk_warps=4)
"""For float32: products without tensor cores, on small tiles in registers."""
SINGLE_VALUES = 16
"""Values per program for rows of one token."""


@triton.jit
def _delta_token(
    state,
    token,
    head,
    key,
    value,
    rate,
    bias,
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    step_ptr,
    beta_ptr,
    stride_q,
    stride_k,
    stride_v,
    stride_step,
    stride_beta,
    scale,
    strength,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BOUND: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Store a token's output, and return the state after it, [BLOCK_K, VALUES] float32."""
    group = head // (HEADS // GROUPS)
    in_k, in_v = key < K, value < V
    q = tl.load(q_ptr + token * stride_q + group * K + key, mask=in_k, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + token * stride_k + group * K + key, mask=in_k, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + token * stride_v + head * V + value, mask=in_v, other=0.0).to(tl.float32)
    if CHANNELS:
        step = tl.load(step_ptr + token * stride_step + head * K + key, mask=in_k, other=0.0)
    else:
        step = tl.load(step_ptr + token * stride_step + head)
    beta = tl.load(beta_ptr + token * stride_beta + head).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    left = tl.exp(log_decay(step.to(tl.float32) + bias, rate, BOUND))
    state *= left[:, None] if CHANNELS else left
    missing = v - tl.sum(state * k[:, None], axis=0)
    if strength is None:
        added = missing / (1.0 + tl.exp(-beta))
    else:
        added = missing * (strength / (1.0 + tl.exp(-beta)))
    state += k[:, None] * added[None, :]
    y = tl.sum(state * q[:, None], axis=0)
    place = (token * HEADS + head) * V + value
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=in_v)
    return state


@triton.jit(do_not_specialize_on_alignment=PLACES)
def delta_step_kernel(
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    step_ptr,
    beta_ptr,
    rate_ptr,
    bias_ptr,
    state_ptr,
    query_start_ptr,
    seq_lens_ptr,
    slots_ptr,
    stride_q,
    stride_k,
    stride_v,
    stride_step,
    stride_beta,
    scale,
    strength,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BOUND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VALUES: tl.constexpr,
    LONG: tl.constexpr,
    CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: VALUES values of one head of one row of at most LONG tokens, one after another.

    CHANNELS: each channel of keys has a decay; strength: of what is added, None: 1; BOUND: see
    `log_decay`.
    """
    head = tl.program_id(1)
    start, count, slot, begins = row_of(tl.program_id(0), query_start_ptr, seq_lens_ptr, slots_ptr)
    if (count == 0) | (count > LONG):
        return
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_k, in_v = key < K, value < V
    inside = in_k[:, None] & in_v[None, :]
    states = state_ptr + ((slot * HEADS + head) * K + key[:, None]) * V + value[None, :]
    state = tl.load(states, mask=inside & (begins == 0), other=0.0).to(tl.float32)
    rate = tl.load(rate_ptr + head)
    if CHANNELS:
        bias = tl.load(bias_ptr + head * K + key, mask=in_k, other=0.0)
    else:
        bias = tl.load(bias_ptr + head)
    if PDL:
        # In a step of rows of one token nothing else writes their states.
        gdc_launch_dependents()
        gdc_wait()
    if LONG == 1:
        state = _delta_token(
            state, start, head, key, value, rate, bias, out_ptr, q_ptr, k_ptr, v_ptr, step_ptr,
            beta_ptr, stride_q, stride_k, stride_v, stride_step, stride_beta, scale, strength,
            HEADS, GROUPS, K, V, BOUND, CHANNELS,
        )  # fmt: skip
    else:
        for at in range(0, count):
            state = _delta_token(
                state, start + at, head, key, value, rate, bias, out_ptr, q_ptr, k_ptr, v_ptr,
                step_ptr, beta_ptr, stride_q, stride_k, stride_v, stride_step, stride_beta, scale,
                strength, HEADS, GROUPS, K, V, BOUND, CHANNELS,
            )  # fmt: skip
    tl.store(states, state.to(state_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=PLACES)
def delta_recurrence_kernel(
    out_ptr,
    own_ptr,
    seen_ptr,
    scores_ptr,
    factors_ptr,
    q_ptr,
    k_ptr,
    state_ptr,
    query_start_ptr,
    seq_lens_ptr,
    slots_ptr,
    num_rows,
    num_tokens,
    stride_q,
    stride_k,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One program: VALUES values of one head of some rows of several tokens.

    CHANNELS: each channel of keys has a decay; then queries and keys have their factors, and
    `factors` are the decays of chunks, [chunks, H, K].
    """
    head = tl.program_id(1)
    group = head // (HEADS // GROUPS)
    at = tl.arange(0, CHUNK)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_k, in_v = key < K, value < V
    inside = in_k[:, None] & in_v[None, :]
    narrow = own_ptr.dtype.element_ty
    part = tl.num_programs(1).to(tl.int64) * num_tokens
    index = tl.program_id(0)
    row, chunk, num_longer = long_row(index, query_start_ptr, num_rows, CHUNK)
    while index < num_longer:
        start, count, slot, begins = row_of(row, query_start_ptr, seq_lens_ptr, slots_ptr)
        states = state_ptr + ((slot * HEADS + head) * K + key[:, None]) * V + value[None, :]
        state = tl.load(states, mask=inside & (begins == 0), other=0.0).to(tl.float32)
        place = start * HEADS + head
        out = out_ptr + place * V
        owns = own_ptr + place * V
        seens = seen_ptr + place * K
        pairs = scores_ptr + place * CHUNK
        queries = q_ptr + start * stride_q + group * K
        keys = k_ptr + start * stride_k + group * K
        if CHANNELS:
            factors = factors_ptr + (chunk.to(tl.int64) * HEADS + head) * K + key
        else:
            factors = factors_ptr + head.to(tl.int64) * num_tokens + start
        for first in range(0, count, CHUNK):
            token = first + at
            here = token < count
            in_keys = here[:, None] & in_k[None, :]
            in_values = here[:, None] & in_v[None, :]
            line = token[:, None]
            values = line * (HEADS * V) + value[None, :]
            q = tl.load(queries + line * stride_q + key[None, :], mask=in_keys, other=0.0)
            k = tl.load(keys + line * stride_k + key[None, :], mask=in_keys, other=0.0)
            own = tl.load(owns + values, mask=in_values, other=0.0)
            seen = tl.load(seens + line * (HEADS * K) + key[None, :], mask=in_keys, other=0.0)
            scores = tl.load(
                pairs + line * (HEADS * CHUNK) + at[None, :], mask=here[:, None], other=0.0
            )
            if CHANNELS:
                decay = tl.load(factors + first // CHUNK * (HEADS * K), mask=in_k, other=0.0)
                state_decay = decay[:, None]
            else:
                of_query = tl.load(factors + token, mask=here, other=0.0)
                of_key = tl.load(factors + part + token, mask=here, other=0.0)
                state_decay = tl.load(factors + 2 * part + first)
            before = state.to(narrow)
            y = tl.dot(q, before, input_precision=PRECISION)
            if not CHANNELS:
                y *= of_query[:, None]
            added = own.to(tl.float32) - tl.dot(seen, before, input_precision=PRECISION)
            y += tl.dot(scores, added.to(narrow), input_precision=PRECISION)
            tl.store(out + values, y.to(out_ptr.dtype.element_ty), mask=in_values)
            if not CHANNELS:
                added *= of_key[:, None]
            state *= state_decay
            state += tl.dot(tl.trans(k), added.to(narrow), input_precision=PRECISION)
        tl.store(states, state.to(state_ptr.dtype.element_ty), mask=inside)
        index += tl.num_programs(0)
        if index < num_longer:
            row, chunk, _ = long_row(index, query_start_ptr, num_rows, CHUNK)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: torch.Tensor,
    beta: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    state: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """q, k: [T, G, K]; v: [T, H, V]; step, beta: [T, H]: contiguous but for the first dimension;
    weights: rates and dt_bias, [H] float32; state: [num_states, H, K, V], contiguous, changed → [T,
    H, V]"""
    num_tokens, heads, width = v.shape
    groups, size = q.shape[1:]
    num_rows, single = rows.slots.shape[0], rows.max_query_len == 1
    out = torch.empty((num_tokens, heads, width), dtype=v.dtype, device=v.device)
    inputs = (q, k, v, step, beta, *weights)
    places = (rows.query_start, rows.seq_lens, rows.slots)
    block_k = max(16, triton.next_power_of_2(size))
    options = pdl_options(v.device) if single else {}
    launch(delta_step_kernel, (num_rows, heads, triton.cdiv(width, SINGLE_VALUES)))(
        out, *inputs, state, *places,
        q.stride(0), k.stride(0), v.stride(0), step.stride(0), beta.stride(0), size**-0.5,
        None, HEADS=heads, GROUPS=groups, K=size, V=width, BOUND=None, BLOCK_K=block_k,
        VALUES=SINGLE_VALUES, LONG=1, CHANNELS=False, PDL=bool(options), num_warps=2, **options,
    )  # fmt: skip
    if single:
        return out
    tiles = WIDE if v.dtype == torch.float32 else NARROW
    chunks = delta_chunks(
        *inputs, rows, chunk=tiles.chunk, precision=tiles.precision, num_warps=tiles.chunk_warps
    )
    grid = (min(num_rows, MOST_ROWS), heads, triton.cdiv(width, tiles.values))
    launch(delta_recurrence_kernel, grid)(
        out, *chunks, q, k, state, *places, num_rows, num_tokens, q.stride(0), k.stride(0),
        HEADS=heads, GROUPS=groups, K=size, V=width, BLOCK_K=block_k, VALUES=tiles.values,
        CHUNK=tiles.chunk, PRECISION=tiles.precision, CHANNELS=False, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip
    return out
