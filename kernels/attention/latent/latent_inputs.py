"""Norms and rotates latent attention's inputs, and stores latents in the cache.

One launch instead of a norm, two rotations and a cache write. Memory: reads and writes num_tokens *
(latent_dim + (num_heads + 1) * rope_dim) elements in place, and writes latent_dim + rope_dim to the
cache: the bound, or the launch at one token.

Source: DeepSeek-V2 (arXiv 2405.04434); RoFormer (arXiv 2104.09864).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...launch import launch
from ...pdl import gdc_launch_dependents, gdc_wait, pdl_options

MAX_GROUP = 8
"""Heads per program, at most."""


@triton.jit
def _latent_inputs_kernel(
    query_ptr,
    latent_ptr,
    weight_ptr,
    positions_ptr,
    cos_sin_ptr,
    cache_ptr,
    slot_ptr,
    eps,
    stride_query_token,
    stride_query_head,
    stride_latent,
    stride_cos_sin,
    stride_block,
    stride_slot,
    NUM_HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a token's latent and shared key, or GROUP of its queries."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    HALF: tl.constexpr = ROPE_DIM // 2
    pair = tl.arange(0, BLOCK_HALF)
    in_half = pair < HALF
    # A pair stays where it is: both of its channels are one thread's.
    first_at = pair
    second_at = HALF + pair
    if INTERLEAVED:
        first_at = 2 * pair
        second_at = 2 * pair + 1
    cos = tl.full([BLOCK_HALF], 1.0, tl.float32)
    sin = tl.zeros([BLOCK_HALF], tl.float32)
    if ROTATE:
        position = tl.load(positions_ptr + token).to(tl.int64)
        angles = cos_sin_ptr + position * stride_cos_sin + pair
        cos = tl.load(angles, mask=in_half, other=0.0)
        sin = tl.load(angles + HALF, mask=in_half, other=0.0)
    if part == 0:
        source = latent_ptr + token * stride_latent
        slot = tl.load(slot_ptr + token).to(tl.int64)
        target = cache_ptr + (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
        dim = tl.arange(0, BLOCK_LATENT)
        in_latent = dim < LATENT_DIM
        wide = tl.load(source + dim, mask=in_latent, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + dim, mask=in_latent, other=0.0)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / LATENT_DIM + eps)
        # Rounded before the weight, as the reference does.
        normed = (weight * (wide * scale).to(weight.dtype)).to(latent_ptr.dtype.element_ty)
        tl.store(source + dim, normed, mask=in_latent)
        tl.store(target + dim, normed.to(cache_ptr.dtype.element_ty), mask=in_latent)
        first = tl.load(source + LATENT_DIM + first_at, mask=in_half, other=0.0)
        second = tl.load(source + LATENT_DIM + second_at, mask=in_half, other=0.0)
        turned_first = first.to(tl.float32) * cos - second.to(tl.float32) * sin
        turned_second = second.to(tl.float32) * cos + first.to(tl.float32) * sin
        first = turned_first.to(latent_ptr.dtype.element_ty)
        second = turned_second.to(latent_ptr.dtype.element_ty)
        tl.store(source + LATENT_DIM + first_at, first, mask=in_half)
        tl.store(source + LATENT_DIM + second_at, second, mask=in_half)
        tl.store(target + LATENT_DIM + first_at, first.to(cache_ptr.dtype.element_ty), mask=in_half)
        tl.store(
            target + LATENT_DIM + second_at, second.to(cache_ptr.dtype.element_ty), mask=in_half
        )
    else:
        head = (part - 1) * GROUP + tl.arange(0, GROUP)[:, None]
        heads = query_ptr + token * stride_query_token + head * stride_query_head + NOPE_DIM
        mask_q = (head < NUM_HEADS) & in_half[None, :]
        even = tl.load(heads + first_at[None, :], mask=mask_q, other=0.0).to(tl.float32)
        odd = tl.load(heads + second_at[None, :], mask=mask_q, other=0.0).to(tl.float32)
        turned_even = even * cos[None, :] - odd * sin[None, :]
        turned_odd = odd * cos[None, :] + even * sin[None, :]
        dtype = query_ptr.dtype.element_ty
        tl.store(heads + first_at[None, :], turned_even.to(dtype), mask=mask_q)
        tl.store(heads + second_at[None, :], turned_odd.to(dtype), mask=mask_q)


def latent_inputs(
    query: torch.Tensor,
    latent: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool,
) -> None:
    """Norm latents, rotate shared keys and queries, in place, and store the former in the cache.

    query: [num_tokens, num_heads, nope_dim + rope_dim], the last rope_dim are rotated; latent:
    [num_tokens, latent_dim + rope_dim]; last strides 1, others free; weight: [latent_dim];
    positions: [num_tokens] int; cos_sin: [max_positions, rope_dim] float32, cosines then sines,
    None: no rotation; cache: [num_blocks, block_size, latent_dim + rope_dim], of query's type;
    slot_mapping: [num_tokens] int; interleaved: pairs are of neighbours, otherwise of halves.
    Computed in float32.
    """
    num_tokens, num_heads, key_dim = query.shape
    if num_tokens == 0:
        return
    latent_dim = weight.shape[0]
    rope_dim = latent.shape[1] - latent_dim
    group = min(triton.next_power_of_2(num_heads), MAX_GROUP)
    parts = triton.cdiv(num_heads, group) if cos_sin is not None else 0
    options = pdl_options(query.device)
    launch(_latent_inputs_kernel, (num_tokens, 1 + parts))(
        query,
        latent,
        weight,
        positions,
        cos_sin,
        cache,
        slot_mapping,
        eps,
        query.stride(0),
        query.stride(1),
        latent.stride(0),
        0 if cos_sin is None else cos_sin.stride(0),
        cache.stride(0),
        cache.stride(1),
        NUM_HEADS=num_heads,
        LATENT_DIM=latent_dim,
        ROPE_DIM=rope_dim,
        NOPE_DIM=key_dim - rope_dim,
        ROTATE=cos_sin is not None,
        INTERLEAVED=interleaved,
        BLOCK_SIZE=cache.shape[1],
        GROUP=group,
        BLOCK_LATENT=triton.next_power_of_2(latent_dim),
        BLOCK_HALF=triton.next_power_of_2(max(rope_dim // 2, 1)),
        PDL=bool(options),
        num_warps=4,
        **options,
    )
