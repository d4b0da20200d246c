"""Delta rule whose state decays by a number per channel of keys, over rows of any lengths.

    S[k] = exp(g[k]) S[k]    S += k (strength sigmoid(beta) (v - Sᵀ k))ᵀ    y = Sᵀ q / sqrt(K)
    g = rate softplus(step + bias), or bounded, g = bound sigmoid(-rate (step + bias)), with queries
    and keys divided by their lengths first

One program holds the state of one row and head (for some of its values) in registers. Of rows of
one token, and in float32 of all, it walks over tokens. Other rows are computed chunk by chunk, as
those of `delta_rule`, from what `channel_delta_chunks` has found of all chunks in a launch before.

Memory: queries, keys, steps, values and outputs once per token (the first three by each program of
a head), a state once per row: the bound of rows of one token. A walk has as many steps one after
another as the longest row has tokens, and is bound by their latency. Source: Kimi Linear (arXiv
2510.26692). Twin: `core.nn.state.operations.StateOperations.channel_delta_rule`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from .channel_delta_chunks import channel_delta_chunks
from .delta_rule import delta_walk_kernel
from .rows import MOST_ROWS, PLACES, Rows, row_of, softplus

VALUES = 16
"""Values per program that walks over tokens."""
ANY_LENGTH = 1 << 30
CHUNKED = True
"""Whether rows of several tokens are computed chunk by chunk, in 16 bits."""


class ChannelTiles(NamedTuple):
    """How rows of several tokens are computed in 16 bits."""

    chunk: int = 64
    block_k: int = 64
    """Channels of keys that are computed together, before states are known."""
    chunk_warps: int = 8
    values: int = 32
    """Values per program that walks over chunks."""
    num_warps: int = 4
    num_stages: int = 3


TILES = ChannelTiles()


@triton.jit(do_not_specialize_on_alignment=PLACES)
def _channel_delta_rule_kernel(
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
    K: tl.constexpr,
    V: tl.constexpr,
    BOUND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VALUES: tl.constexpr,
    LONG: tl.constexpr,
):
    """One program: VALUES values of one head of one row of at most LONG tokens."""
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
    bias = tl.load(bias_ptr + head * K + key, mask=in_k, other=0.0)
    for at in range(0, count):
        token = start + at
        q = tl.load(q_ptr + token * stride_q + head * K + key, mask=in_k, other=0.0)
        k = tl.load(k_ptr + token * stride_k + head * K + key, mask=in_k, other=0.0)
        v = tl.load(v_ptr + token * stride_v + head * V + value, mask=in_v, other=0.0)
        step = tl.load(step_ptr + token * stride_step + head * K + key, mask=in_k, other=0.0)
        beta = tl.load(beta_ptr + token * stride_beta + head).to(tl.float32)
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        step = step.to(tl.float32) + bias
        if BOUND is None:
            decay = rate * softplus(step)
        else:
            decay = BOUND / (1.0 + tl.exp(rate * step))
        state *= tl.exp(decay)[:, None]
        missing = v - tl.sum(state * k[:, None], axis=0)
        state += k[:, None] * (missing * (strength / (1.0 + tl.exp(-beta))))[None, :]
        y = tl.sum(state * q[:, None], axis=0)
        place = (token * HEADS + head) * V + value
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=in_v)
    tl.store(states, state.to(state_ptr.dtype.element_ty), mask=inside)


def channel_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: torch.Tensor,
    beta: torch.Tensor,
    rate: torch.Tensor,
    dt_bias: torch.Tensor,
    bound: float | None,
    strength: float,
    state: torch.Tensor,
    rows: Rows,
    *,
    chunked: bool | None = None,
    tiles: ChannelTiles = TILES,
) -> torch.Tensor:
    """q, k, step: [T, H, K]; v: [T, H, V]; beta: [T, H]: contiguous but for the first dimension;
    rate: [H], dt_bias: [H, K], float32 and contiguous; state: [num_states, H, K, V], contiguous,
    changed → [T, H, V]

    chunked: in half precision, compute rows of several tokens by chunks; None: where that is
    faster.
    """
    num_tokens, heads, width = v.shape
    size = q.shape[2]
    out = torch.empty((num_tokens, heads, width), dtype=v.dtype, device=v.device)
    places = (rows.query_start, rows.seq_lens, rows.slots)
    if chunked is None:
        chunked = CHUNKED
    chunked &= not rows.single and v.dtype != torch.float32
    num_rows = rows.slots.shape[0]
    launch(_channel_delta_rule_kernel, (num_rows, heads, triton.cdiv(width, VALUES)))(
        out, q, k, v, step, beta, rate, dt_bias, state, *places,
        q.stride(0), k.stride(0), v.stride(0), step.stride(0), beta.stride(0), size**-0.5,
        strength, HEADS=heads, K=size, V=width, BOUND=bound, BLOCK_K=triton.next_power_of_2(size),
        VALUES=VALUES, LONG=1 if chunked else ANY_LENGTH, num_warps=2,
    )  # fmt: skip
    if not chunked:
        return out
    chunks = channel_delta_chunks(
        q, k, v, step, beta, rate, dt_bias, bound, strength, rows,
        chunk=tiles.chunk, block_k=tiles.block_k, num_warps=tiles.chunk_warps,
    )  # fmt: skip
    grid = (min(num_rows, MOST_ROWS), heads, triton.cdiv(width, tiles.values))
    launch(delta_walk_kernel, grid)(
        out, chunks.own, chunks.seen, chunks.scores, chunks.decay, chunks.q, chunks.k, state,
        *places, num_rows, num_tokens, chunks.q.stride(0), chunks.k.stride(0),
        HEADS=heads, GROUPS=heads, K=size, V=width, BLOCK_K=max(16, triton.next_power_of_2(size)),
        VALUES=tiles.values, CHUNK=tiles.chunk, PRECISION="tf32", CHANNELS=True,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out
