"""Chunk-local terms of the delta rule with a decay per channel of keys, before any state is known.

As `delta_chunks`, but the decay from token j to token i differs per channel:

    pairs[i, j] = Σ_k k[i, k] k[j, k] exp(total[i, k] - total[j, k])        scores: q[i] for k[i]

with total the cumulative logarithm of decays. A product of tiles needs the exponent split at some
token r, total[i] - total[r] and total[r] - total[j], without overflow. Between the two halves of a
block of 2 s tokens, r is the end of the first half, and both terms are negative. So two halves of
32 tokens, then all halves of 16 in them, take one product of all tokens each, of which the other
pairs are dropped. Within 16 tokens, r is the middle, and a token's decay is clamped to at least
exp(LEAST), below 16-bit rounding.

Memory: reads queries, keys, steps and values once and writes 3 K + V + L numbers per token and
head, for chunks of L tokens. Products as in `delta_chunks`, and 4 more of [L, L, K]. Source: Kimi
Linear (arXiv 2510.26692), section 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from .delta_chunks import inverse_of, store_own
from .rows import PLACES, Rows, log_decay, longer_row

LEAST = tl.constexpr(-9.0)
"""Logarithm of a decay within a block: 8 of them, and a key, fit float32."""
SUB = tl.constexpr(16)
"""Tokens of a block whose pairs are computed from its middle."""


class ChannelChunks(NamedTuple):
    """Chunk-local terms, undefined for rows of one token."""

    own: torch.Tensor
    """[T, H, V]: tokens' additions if the state before the chunk is zero."""
    seen: torch.Tensor
    """[T, H, K]: multiplied by that state, subtracted from the additions."""
    scores: torch.Tensor
    """[T, H, L]: factors of the chunk's tokens in an output."""
    q: torch.Tensor
    """[T, H, K]: queries, times the decay since the chunk's begin."""
    k: torch.Tensor
    """[T, H, K]: keys, times the decay until its end."""
    decay: torch.Tensor
    """[chunks, H, K] float32: of a chunk."""


@triton.jit
def _decay_to_halves(decay, CHUNK: tl.constexpr, SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """[CHUNK, BLOCK_K] → what is left, of blocks of 2 SIZE tokens: at tokens of second halves since
    the end of the first, and there of what tokens of first halves add."""
    halves = tl.reshape(decay, [CHUNK // SIZE, SIZE, BLOCK_K])
    until = tl.cumsum(halves, axis=1)
    since = tl.sum(halves, axis=1)[:, None, :] - until
    second = tl.arange(0, CHUNK // SIZE) % 2 == 1
    left = tl.exp(tl.where(second[:, None, None], until, since))
    return tl.reshape(left, [CHUNK, BLOCK_K])


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=PLACES)
def _channel_chunk_kernel(
    own_ptr,
    seen_ptr,
    scores_ptr,
    decayed_q_ptr,
    decayed_k_ptr,
    decay_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    step_ptr,
    beta_ptr,
    rate_ptr,
    bias_ptr,
    query_start_ptr,
    num_rows,
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
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: one head of one chunk, of SUB << LEVELS tokens."""
    index = tl.program_id(0)
    row, chunk, _ = longer_row(index, query_start_ptr, num_rows, CHUNK)
    if row < 0:
        return
    head = tl.program_id(1)
    begin = (tl.load(query_start_ptr + row) + chunk * CHUNK).to(tl.int64)
    at = tl.arange(0, CHUNK)
    inside = at < tl.load(query_start_ptr + row + 1) - begin
    line = at[:, None]
    narrow = own_ptr.dtype.element_ty
    queries = q_ptr + begin * stride_q + head * K
    keys = k_ptr + begin * stride_k + head * K
    steps = step_ptr + begin * stride_step + head * K
    betas = beta_ptr + begin * stride_beta + head
    beta = tl.load(betas + at * stride_beta, mask=inside, other=0.0).to(tl.float32)
    beta = tl.where(inside, strength / (1.0 + tl.exp(-beta)), 0.0)
    rate = tl.load(rate_ptr + head)
    unit_q = tl.full([CHUNK], 1e-6, tl.float32)
    unit_k = unit_q
    for low in range(0, K, BLOCK_K):
        key = low + tl.arange(0, BLOCK_K)
        in_k = inside[:, None] & (key < K)[None, :]
        q = tl.load(queries + line * stride_q + key[None, :], mask=in_k, other=0.0).to(tl.float32)
        k = tl.load(keys + line * stride_k + key[None, :], mask=in_k, other=0.0).to(tl.float32)
        unit_q += tl.sum(q * q, axis=1)
        unit_k += tl.sum(k * k, axis=1)
    unit_q, unit_k = tl.rsqrt(unit_q) * scale, tl.rsqrt(unit_k)

    apart = at[:, None] ^ at[None, :]
    earlier = at[:, None] >= at[None, :]
    place = begin * HEADS + head
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    for low in range(0, K, BLOCK_K):
        key = low + tl.arange(0, BLOCK_K)
        in_k = inside[:, None] & (key < K)[None, :]
        q = tl.load(queries + line * stride_q + key[None, :], mask=in_k, other=0.0).to(tl.float32)
        k = tl.load(keys + line * stride_k + key[None, :], mask=in_k, other=0.0).to(tl.float32)
        step = tl.load(steps + line * stride_step + key[None, :], mask=in_k, other=0.0)
        bias = tl.load(bias_ptr + head * K + key, mask=key < K, other=0.0)
        step = step.to(tl.float32) + bias[None, :]
        decay = log_decay(step, rate, BOUND)
        # Tokens behind the row's end neither add nor decay.
        decay = tl.where(in_k, decay, 0.0)
        q *= unit_q[:, None]
        k *= unit_k[:, None]
        total = tl.cumsum(decay, axis=0)
        end = tl.sum(decay, axis=0)
        numbers = place * K + line * (HEADS * K) + key[None, :]
        left = tl.exp(total)
        tl.store(decayed_q_ptr + numbers, (q * left).to(narrow), mask=in_k)
        tl.store(seen_ptr + numbers, (k * left).to(narrow), mask=in_k)
        left = tl.exp(end[None, :] - total)
        tl.store(decayed_k_ptr + numbers, (k * left).to(narrow), mask=in_k)
        ends = decay_ptr + (index.to(tl.int64) * HEADS + head) * K + key
        tl.store(ends, tl.exp(end), mask=key < K)

        for level in tl.static_range(LEVELS):
            left = _decay_to_halves(decay, CHUNK, CHUNK >> (level + 1), BLOCK_K)
            near = (apart // (CHUNK >> (level + 1)) == 1) & earlier
            weighted = (k * left).to(narrow)
            turned = tl.trans(weighted)
            product = tl.dot(weighted, turned, input_precision=PRECISION)
            pairs += tl.where(near, product, 0.0)
            product = tl.dot((q * left).to(narrow), turned, input_precision=PRECISION)
            scores += tl.where(near, product, 0.0)
        blocks = tl.reshape(tl.maximum(decay, LEAST), [CHUNK // SUB, SUB, BLOCK_K])
        first = (tl.arange(0, SUB) < SUB // 2)[None, :, None]
        until = tl.cumsum(blocks, axis=1)
        until -= tl.sum(tl.where(first, blocks, 0.0), axis=1)[:, None, :]
        until = tl.reshape(until, [CHUNK, BLOCK_K])
        left = tl.exp(until)
        turned = tl.trans(k * tl.exp(-until))
        # What overflows is later tokens', which is not chosen.
        near = (apart // SUB == 0) & earlier
        product = tl.dot(k * left, turned, input_precision=PRECISION)
        pairs += tl.where(near, product, 0.0)
        product = tl.dot(q * left, turned, input_precision=PRECISION)
        scores += tl.where(near, product, 0.0)

    places = scores_ptr + place * CHUNK + line * (HEADS * CHUNK) + at[None, :]
    tl.store(places, scores.to(narrow), mask=inside[:, None])
    lower = tl.where(at[:, None] > at[None, :], pairs * beta[:, None], 0.0)
    weights = (inverse_of(lower, CHUNK, PRECISION) * beta[None, :]).to(narrow)
    # Other threads have stored the keys.
    tl.debug_barrier()
    for low in range(0, K, BLOCK_K):
        key = low + tl.arange(0, BLOCK_K)
        in_k = inside[:, None] & (key < K)[None, :]
        numbers = place * K + line * (HEADS * K) + key[None, :]
        k = tl.load(seen_ptr + numbers, mask=in_k, other=0.0)
        seen = tl.dot(weights, k, input_precision=PRECISION)
        tl.store(seen_ptr + numbers, seen.to(narrow), mask=in_k)
    store_own(
        own_ptr, v_ptr, weights, begin, head, at, inside, stride_v, HEADS, V, BLOCK_V, PRECISION
    )


def channel_delta_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: torch.Tensor,
    beta: torch.Tensor,
    rate: torch.Tensor,
    dt_bias: torch.Tensor,
    bound: float | None,
    strength: float,
    rows: Rows,
    *,
    chunk: int,
    block_k: int,
    num_warps: int,
) -> ChannelChunks:
    """Arguments as `channel_delta_rule`'s, half precision; chunk: tokens of a chunk, a power of 2,
    at least 16; block_k: channels of keys that are computed together."""
    num_tokens, heads, width = v.shape
    size = q.shape[2]
    num_rows = rows.slots.shape[0]
    # A row has several tokens, and its last chunk may have one.
    num_chunks = num_tokens // chunk + min(num_rows, num_tokens // 2)
    seen, decayed_q, decayed_k = torch.empty(
        (3, num_tokens, heads, size), dtype=v.dtype, device=v.device
    )
    chunks = ChannelChunks(
        own=torch.empty_like(v, memory_format=torch.contiguous_format),
        seen=seen,
        scores=torch.empty((num_tokens, heads, chunk), dtype=v.dtype, device=v.device),
        q=decayed_q,
        k=decayed_k,
        decay=torch.empty((num_chunks, heads, size), device=v.device),
    )
    launch(_channel_chunk_kernel, (num_chunks, heads))(
        *chunks, q, k, v, step, beta, rate, dt_bias, rows.query_start, num_rows,
        q.stride(0), k.stride(0), v.stride(0), step.stride(0), beta.stride(0), size**-0.5,
        strength, HEADS=heads, K=size, V=width, BOUND=bound,
        BLOCK_K=min(block_k, max(16, triton.next_power_of_2(size))),
        BLOCK_V=min(64, max(16, triton.next_power_of_2(width))),
        CHUNK=chunk, LEVELS=(chunk // SUB.value).bit_length() - 1, PRECISION="tf32",
        num_warps=num_warps, num_stages=1,
    )  # fmt: skip
    return chunks
