"""Layer norms of a fused projection's queries and keys, each head by itself and in place.

    (x - mean) / deviation * weight + bias        over the channels of each head

Memory: reads and writes num_tokens * (num_heads + num_kv_heads) * head_dim elements once: the
bound, or the launch at few tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options

ELEMENTS = 2048


@triton.jit
def _norm_heads_kernel(
    qkv_ptr,
    query_weight_ptr,
    key_weight_ptr,
    query_bias_ptr,
    key_bias_ptr,
    query_eps,
    key_eps,
    stride_qkv,
    stride_query_weight,
    stride_key_weight,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERY_BIAS: tl.constexpr,
    KEY_BIAS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: HEADS heads of one token."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, BLOCK_D)
    in_head = (dim < HEAD_DIM)[None, :]
    of_query = (head < NUM_HEADS)[:, None] & in_head
    key_head = head - NUM_HEADS
    of_key = ((key_head >= 0) & (key_head < NUM_KV_HEADS))[:, None] & in_head
    query_places = (head * stride_query_weight)[:, None] + dim[None, :]
    key_places = (key_head * stride_key_weight)[:, None] + dim[None, :]
    weight = tl.load(query_weight_ptr + query_places, mask=of_query, other=0.0).to(tl.float32)
    weight += tl.load(key_weight_ptr + key_places, mask=of_key, other=0.0).to(tl.float32)
    bias = tl.zeros([HEADS, BLOCK_D], tl.float32)
    if QUERY_BIAS:
        bias += tl.load(query_bias_ptr + dim[None, :], mask=of_query, other=0.0).to(tl.float32)
    if KEY_BIAS:
        bias += tl.load(key_bias_ptr + dim[None, :], mask=of_key, other=0.0).to(tl.float32)
    eps = tl.where(head < NUM_HEADS, query_eps, key_eps)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mask = of_query | of_key
    places = qkv_ptr + row * stride_qkv + head[:, None] * HEAD_DIM + dim[None, :]
    x = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    centered = tl.where(in_head, x - (tl.sum(x, axis=1) / HEAD_DIM)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, axis=1) / HEAD_DIM + eps)
    normed = centered * scale[:, None] * weight + bias
    tl.store(places, normed.to(qkv_ptr.dtype.element_ty), mask=mask)


def norm_heads(
    qkv: torch.Tensor,
    layout: tuple[int, int, int],
    query_norm: tuple[torch.Tensor, torch.Tensor | None, float, Any],
    key_norm: tuple[torch.Tensor, torch.Tensor | None, float, Any],
) -> None:
    """Norm queries and keys in place.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], last stride 1; layout: these
    three; norms: (weight [head_dim], or [heads, head_dim] contiguous, a bias [head_dim] or None,
    eps, …). In float32, rounded once.
    """
    num_tokens, (num_heads, num_kv_heads, head_dim) = qkv.shape[0], layout
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(head_dim)
    normed = num_heads + num_kv_heads
    heads = min(max(ELEMENTS // block, 1), triton.next_power_of_2(normed))
    options = pdl_options(qkv.device)
    query_weight, query_bias, query_eps, _ = query_norm
    key_weight, key_bias, key_eps, _ = key_norm
    launch(_norm_heads_kernel, (num_tokens, triton.cdiv(normed, heads)))(
        qkv,
        query_weight,
        key_weight,
        query_bias,
        key_bias,
        query_eps,
        key_eps,
        qkv.stride(0),
        head_dim if query_weight.dim() == 2 else 0,
        head_dim if key_weight.dim() == 2 else 0,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        QUERY_BIAS=query_bias is not None,
        KEY_BIAS=key_bias is not None,
        HEADS=heads,
        BLOCK_D=block,
        PDL=bool(options),
        num_warps=4,
        **options,
    )
