"""Chunk-local terms of the gated delta rule for prompts, before any state is known.

Within a chunk, token i adds k[i] u[i]ᵀ to the state, and u[i] depends on all u[j] before it:

    u[i] = beta[i] (v[i] - decay(i) Sᵀ k[i] - Σ_{j<i} decay(i, j) (k[i]·k[j]) u[j])

with S the state before the chunk, decay(i) what is left of it at token i, and decay(i, j) what is
left there of what token j added. With A[i, j] = beta[i] decay(i, j) k[i]·k[j] below the diagonal
and T = (I + A)⁻¹, that is

    U = own - seen S        own = T diag(beta) V        seen = T diag(beta decay) K
    y = decay Q S + scores U        scores[i, j] = decay(i, j) q[i]·k[j], j ≤ i

T, own, seen and scores do not depend on S: all chunks of all rows and heads are computed at once
here, and `delta_rule` walks over the chunks of a row.

Memory: reads queries, keys and values once (queries and keys by each head), and writes K + V + L
numbers per token and head, for chunks of L tokens. Some 2 L (3 K + V) operations per token and
head, and for T two products of [L, L] for each doubling of the inverted blocks: bound by the
latency of those. Source: arXiv 2412.06464, section 3.3; parallel form of arXiv 2406.06484.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from .rows import PLACES, Rows, log_decay, longer_row

NUM_FACTORS = 3


class DeltaChunks(NamedTuple):
    """Chunk-local terms: [T, H, ...], undefined for rows of one token."""

    own: torch.Tensor
    """[T, H, V]: tokens' additions if the state before the chunk is zero."""
    seen: torch.Tensor
    """[T, H, K]: multiplied by that state, subtracted from the additions."""
    scores: torch.Tensor
    """[T, H, L]: factors of the chunk's tokens in an output."""
    factors: torch.Tensor
    """[3, H, T] float32: of a query and of a key, the inverse of its length times the decay since
    the chunk's begin, or until its end; the decay of the chunk."""


@triton.jit
def inverse_of(lower, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + lower)⁻¹, [CHUNK, CHUNK]; lower is strictly lower triangular. Inverts diagonal
    blocks of doubling size: a power series would grow binomially if all keys are alike.
    """
    at = tl.arange(0, CHUNK)
    apart = at[:, None] ^ at[None, :]
    inverse = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, lower, 0.0)
    size = 2
    while size < CHUNK:
        part = tl.where(apart // size == 1, lower, 0.0)
        part = tl.dot(inverse, part, input_precision=PRECISION)
        inverse -= tl.dot(part, inverse, input_precision=PRECISION)
        size *= 2
    return inverse


@triton.jit
def store_own(
    own_ptr, v_ptr, weights, begin, head, at, inside, stride_v, HEADS: tl.constexpr,
    V: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store what a chunk's tokens add if the state before it is zero: weights, [CHUNK, CHUNK] of
    own_ptr's type, times their values. at, inside: numbers of the tokens, and which exist"""
    line = at[:, None]
    for low in tl.static_range(0, V, BLOCK_V):
        value = low + tl.arange(0, BLOCK_V)
        in_v = inside[:, None] & (value < V)[None, :]
        values = v_ptr + begin * stride_v + head * V + line * stride_v + value[None, :]
        v = tl.load(values, mask=in_v, other=0.0)
        own = tl.dot(weights, v, input_precision=PRECISION)
        owns = own_ptr + (begin * HEADS + head) * V + line * (HEADS * V) + value[None, :]
        tl.store(owns, own.to(own_ptr.dtype.element_ty), mask=in_v)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=PLACES)
def _delta_chunk_kernel(
    own_ptr,
    seen_ptr,
    scores_ptr,
    factors_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    step_ptr,
    beta_ptr,
    rate_ptr,
    bias_ptr,
    query_start_ptr,
    num_rows,
    num_tokens,
    stride_q,
    stride_k,
    stride_v,
    stride_step,
    stride_beta,
    scale,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: one head of one chunk."""
    row, chunk, _ = longer_row(tl.program_id(0), query_start_ptr, num_rows, CHUNK)
    if row < 0:
        return
    head = tl.program_id(1)
    at = tl.arange(0, CHUNK)
    start = tl.load(query_start_ptr + row)
    end_row = tl.load(query_start_ptr + row + 1)
    begin = (start + chunk * CHUNK).to(tl.int64)
    group = head // (HEADS // GROUPS)
    inside = at < end_row - begin
    line = at[:, None]
    key = tl.arange(0, BLOCK_K)
    in_k = inside[:, None] & (key < K)[None, :]
    queries = q_ptr + begin * stride_q + group * K
    q = tl.load(queries + line * stride_q + key[None, :], mask=in_k, other=0.0)
    keys = k_ptr + begin * stride_k + group * K
    k = tl.load(keys + line * stride_k + key[None, :], mask=in_k, other=0.0)
    wide = q.to(tl.float32)
    unit_q = tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6) * scale
    wide = k.to(tl.float32)
    unit_k = tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6)
    steps = step_ptr + begin * stride_step + head
    step = tl.load(steps + at * stride_step, mask=inside, other=0.0).to(tl.float32)
    betas = beta_ptr + begin * stride_beta + head
    beta = tl.load(betas + at * stride_beta, mask=inside, other=0.0).to(tl.float32)
    beta = tl.where(inside, 1.0 / (1.0 + tl.exp(-beta)), 0.0)
    decay = log_decay(step + tl.load(bias_ptr + head), tl.load(rate_ptr + head), None)
    # Tokens behind the row's end neither add nor decay.
    decay = tl.where(inside, decay, 0.0)
    total = tl.cumsum(decay, axis=0)
    end = tl.sum(decay, axis=0)

    factors = factors_ptr + head.to(tl.int64) * num_tokens + begin + at
    part = tl.num_programs(1).to(tl.int64) * num_tokens
    tl.store(factors, unit_q * tl.exp(total), mask=inside)
    tl.store(factors + part, unit_k * tl.exp(end - total), mask=inside)
    tl.store(factors + 2 * part, tl.exp(end), mask=inside)

    earlier = at[:, None] >= at[None, :]
    # Chosen before exp, which may overflow for later tokens.
    left = tl.exp(tl.where(earlier, total[:, None] - total[None, :], float("-inf")))
    left *= unit_k[None, :]
    place = begin * HEADS + head
    narrow = own_ptr.dtype.element_ty
    turned = tl.trans(k)
    scores = tl.dot(q, turned, input_precision=PRECISION) * left * unit_q[:, None]
    pairs = scores_ptr + place * CHUNK + line * (HEADS * CHUNK) + at[None, :]
    tl.store(pairs, scores.to(narrow), mask=inside[:, None])
    lower = tl.dot(k, turned, input_precision=PRECISION) * left * (beta * unit_k)[:, None]
    lower = tl.where(at[:, None] > at[None, :], lower, 0.0)
    inverse = inverse_of(lower, CHUNK, PRECISION)
    weights = (inverse * (beta * unit_k * tl.exp(total))[None, :]).to(narrow)
    seen = tl.dot(weights, k, input_precision=PRECISION)
    seens = seen_ptr + place * K + line * (HEADS * K) + key[None, :]
    tl.store(seens, seen.to(narrow), mask=in_k)
    weights = (inverse * beta[None, :]).to(narrow)
    store_own(
        own_ptr, v_ptr, weights, begin, head, at, inside, stride_v, HEADS, V, BLOCK_V, PRECISION
    )


def delta_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: torch.Tensor,
    beta: torch.Tensor,
    rate: torch.Tensor,
    dt_bias: torch.Tensor,
    rows: Rows,
    *,
    chunk: int,
    precision: str,
    num_warps: int,
) -> DeltaChunks:
    """Arguments as `delta_rule`'s; chunk: tokens of a chunk, a power of 2, at least 16; precision:
    of products."""
    num_tokens, heads, width = v.shape
    groups, size = q.shape[1:]
    num_rows = rows.slots.shape[0]
    chunks = DeltaChunks(
        own=torch.empty_like(v, memory_format=torch.contiguous_format),
        seen=torch.empty((num_tokens, heads, size), dtype=v.dtype, device=v.device),
        scores=torch.empty((num_tokens, heads, chunk), dtype=v.dtype, device=v.device),
        factors=torch.empty((NUM_FACTORS, heads, num_tokens), device=v.device),
    )
    block_k = max(16, triton.next_power_of_2(size))
    block_v = min(64, max(16, triton.next_power_of_2(width)))
    # A row has several tokens, and its last chunk may have one.
    grid = (num_tokens // chunk + min(num_rows, num_tokens // 2), heads)
    launch(_delta_chunk_kernel, grid)(
        *chunks, q, k, v, step, beta, rate, dt_bias, rows.query_start, num_rows, num_tokens,
        q.stride(0), k.stride(0), v.stride(0), step.stride(0), beta.stride(0), size**-0.5,
        HEADS=heads, GROUPS=groups, K=size, V=width, BLOCK_K=block_k, BLOCK_V=block_v,
        CHUNK=chunk, PRECISION=precision, num_warps=num_warps, num_stages=1,
    )  # fmt: skip
    return chunks
