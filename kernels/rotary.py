"""Rotary position embedding, NeoX style, in place on queries and keys in one launch.

Memory: reads and writes num_tokens * (num_heads + num_kv_heads) * rotary_dim elements, and reads
rotary_dim floats a token. 6 operations a pair: bound by memory.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate(
    base,
    stride_head,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotate NUM_HEADS heads of one token that starts at base."""
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (head < NUM_HEADS) & (dim < HALF)
    first_ptrs = base + head * stride_head + dim
    first = tl.load(first_ptrs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = base.dtype.element_ty
    tl.store(first_ptrs, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(first_ptrs + HALF, (second * cos + first * sin).to(dtype), mask=mask)


@triton.jit
def _rotary_kernel(
    query_ptr,
    key_ptr,
    positions_ptr,
    cos_sin_ptr,
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
    stride_cos_sin,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KV_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """One program a token: all its query and key heads."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    row = cos_sin_ptr + position * stride_cos_sin + dim
    cos = tl.load(row, mask=dim < HALF, other=0.0).to(tl.float32)
    sin = tl.load(row + HALF, mask=dim < HALF, other=0.0).to(tl.float32)
    query = query_ptr + token * stride_query_token
    _rotate(query, stride_query_head, cos, sin, NUM_HEADS, HALF, BLOCK_H, BLOCK_HALF)
    key = key_ptr + token * stride_key_token
    _rotate(key, stride_key_head, cos, sin, NUM_KV_HEADS, HALF, BLOCK_KV_H, BLOCK_HALF)


def rotary(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> None:
    """Rotate the first `rotary_dim` channels of each head by its token's position, in place.

    query: [num_tokens, num_heads, head_dim]; key: [num_tokens, num_kv_heads, head_dim]; any token
    and head strides, last stride 1 (views of a fused projection). positions: [num_tokens] int.
    cos_sin: [max_positions, rotary_dim], rotary_dim // 2 cosines then as many sines; channel i
    turns with channel i + rotary_dim // 2.
    """
    num_tokens, num_heads, _ = query.shape
    if num_tokens == 0:
        return
    half = cos_sin.shape[1] // 2
    _rotary_kernel[(num_tokens,)](
        query,
        key,
        positions,
        cos_sin,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        cos_sin.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=key.shape[1],
        HALF=half,
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK_KV_H=triton.next_power_of_2(key.shape[1]),
        BLOCK_HALF=triton.next_power_of_2(half),
        num_warps=4,
    )
