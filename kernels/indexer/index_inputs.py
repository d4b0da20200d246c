"""Norms and rotates an indexer's keys and queries, and stores keys in the cache.

One launch instead of a norm, two rotations and a cache write. Memory: reads and writes num_tokens *
num_heads * rope_dim elements of queries in place, and reads and writes index_dim of keys: the
bound, or the launch at one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options

GROUP = 8


@triton.jit
def _normed(source, weight_ptr, bias_ptr, at, inside, mean, scale):
    """Return channels `at` of a LayerNorm's result, rounded to its input's type."""
    x = tl.load(source + at, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return ((x.to(tl.float32) - mean) * scale * weight + bias).to(x.dtype)


@triton.jit(do_not_specialize=["num_heads"])
def _index_inputs_kernel(
    query_ptr,
    key_ptr,
    weight_ptr,
    bias_ptr,
    positions_ptr,
    cos_sin_ptr,
    cache_ptr,
    slot_ptr,
    eps,
    num_heads,
    stride_query_token,
    stride_query_head,
    stride_key,
    stride_cos_sin,
    stride_block,
    stride_slot,
    INDEX_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a token's key, or GROUP of its queries."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    HALF: tl.constexpr = ROPE_DIM // 2
    pair = tl.arange(0, BLOCK_HALF)
    in_half = pair < HALF
    first_at = pair
    second_at = HALF + pair
    if INTERLEAVED:
        first_at = 2 * pair
        second_at = 2 * pair + 1
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * stride_cos_sin + pair
    cos = tl.load(angles, mask=in_half, other=0.0)
    sin = tl.load(angles + HALF, mask=in_half, other=0.0)
    if part == 0:
        source = key_ptr + token * stride_key
        slot = tl.load(slot_ptr + token).to(tl.int64)
        target = cache_ptr + (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
        dtype = cache_ptr.dtype.element_ty
        dim = tl.arange(0, BLOCK_DIM)
        inside = dim < INDEX_DIM
        wide = tl.load(source + dim, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(wide, axis=0) / INDEX_DIM
        apart = tl.where(inside, wide - mean, 0.0)
        scale = tl.rsqrt(tl.sum(apart * apart, axis=0) / INDEX_DIM + eps)
        rest = inside & (dim >= ROPE_DIM)
        normed = _normed(source, weight_ptr, bias_ptr, dim, rest, mean, scale)
        tl.store(target + dim, normed.to(dtype), mask=rest)
        first = _normed(source, weight_ptr, bias_ptr, first_at, in_half, mean, scale)
        second = _normed(source, weight_ptr, bias_ptr, second_at, in_half, mean, scale)
        turned_first = first.to(tl.float32) * cos - second.to(tl.float32) * sin
        turned_second = second.to(tl.float32) * cos + first.to(tl.float32) * sin
        tl.store(target + first_at, turned_first.to(first.dtype).to(dtype), mask=in_half)
        tl.store(target + second_at, turned_second.to(first.dtype).to(dtype), mask=in_half)
    else:
        head = (part - 1) * GROUP + tl.arange(0, GROUP)[:, None]
        heads = query_ptr + token * stride_query_token + head * stride_query_head
        mask = (head < num_heads) & in_half[None, :]
        even = tl.load(heads + first_at[None, :], mask=mask, other=0.0).to(tl.float32)
        odd = tl.load(heads + second_at[None, :], mask=mask, other=0.0).to(tl.float32)
        turned_even = even * cos[None, :] - odd * sin[None, :]
        turned_odd = odd * cos[None, :] + even * sin[None, :]
        kind = query_ptr.dtype.element_ty
        tl.store(heads + first_at[None, :], turned_even.to(kind), mask=mask)
        tl.store(heads + second_at[None, :], turned_odd.to(kind), mask=mask)


def index_inputs(
    query: torch.Tensor | None,
    key: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool,
) -> torch.Tensor | None:
    """Rotate the first channels of queries, in place, and store normed and rotated keys; return the
    queries.

    query: [num_tokens, num_heads, index_dim], None for keys alone; key: [num_tokens, index_dim];
    last strides 1, others free; weight, bias: [index_dim], of a LayerNorm; positions: [num_tokens]
    int; cos_sin: [max_positions, rope_dim] float32, cosines then sines; cache: [num_blocks,
    block_size, index_dim]; slot_mapping: [num_tokens] int; interleaved: pairs are of neighbours,
    otherwise of halves. Computed in float32, rounded to the key's type after the norm.
    """
    num_tokens, index_dim = key.shape
    if num_tokens == 0:
        return query
    num_heads = 0 if query is None else query.shape[1]
    # Keys alone take the same compiled kernel: strides that it does not use are of the same kind.
    queries = key[:, None] if query is None else query
    options = pdl_options(key.device)
    launch(_index_inputs_kernel, (num_tokens, 1 + triton.cdiv(num_heads, GROUP)))(
        queries,
        key,
        weight,
        bias,
        positions,
        cos_sin,
        cache,
        slot_mapping,
        eps,
        num_heads,
        queries.stride(0),
        queries.stride(1),
        key.stride(0),
        cos_sin.stride(0),
        cache.stride(0),
        cache.stride(1),
        INDEX_DIM=index_dim,
        ROPE_DIM=cos_sin.shape[1],
        INTERLEAVED=interleaved,
        BLOCK_SIZE=cache.shape[1],
        GROUP=GROUP,
        BLOCK_DIM=triton.next_power_of_2(index_dim),
        BLOCK_HALF=triton.next_power_of_2(max(cos_sin.shape[1] // 2, 1)),
        PDL=bool(options),
        num_warps=4,
        **options,
    )
    return query
