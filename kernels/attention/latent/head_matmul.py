"""A matrix product for each head, of few tokens: absorbs heads into queries, and undoes that.

A program computes a tile of one head's outputs for all tokens of a tile, so that up to BLOCK_M
tokens read each weight once; a library's batched product takes several times as long for one token.

Memory: num_heads * in_dim * out_dim elements of weights for each tile of tokens (bound by this).
Operations: 2 * num_tokens * num_heads * in_dim * out_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...launch import launch
from ...pdl import gdc_launch_dependents, gdc_wait, pdl_options

MAX_TOKENS = 64
"""Largest number of tokens this kernel is meant for."""


@triton.jit(do_not_specialize=["num_tokens"])
def _head_matmul_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    num_tokens,
    stride_out_token,
    stride_out_head,
    stride_x_token,
    stride_x_head,
    stride_weight_head,
    stride_weight_in,
    stride_weight_out,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (tile of outputs, head, tile of tokens)."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = (token < num_tokens)[:, None]
    mask_n = (offs_n < OUT)[None, :]
    rows = x_ptr + (token.to(tl.int64) * stride_x_token + head * stride_x_head)[:, None]
    columns = weight_ptr + head * stride_weight_head + (offs_n * stride_weight_out)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if IN <= BLOCK_K:
        # All of the weights are on their way before the kernel before this one ends.
        offs_k = tl.arange(0, BLOCK_K)
        mask_k = offs_k < IN
        weights = columns + (offs_k * stride_weight_in)[:, None]
        weight = tl.load(weights, mask=mask_k[:, None] & mask_n, other=0.0)
        if PDL:
            gdc_wait()
        x = tl.load(rows + offs_k[None, :], mask=mask_m & mask_k[None, :], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    else:
        if PDL:
            gdc_wait()
        for start in range(0, IN, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K)
            mask_k = offs_k < IN
            weights = columns + (offs_k * stride_weight_in)[:, None]
            weight = tl.load(weights, mask=mask_k[:, None] & mask_n, other=0.0)
            x = tl.load(rows + offs_k[None, :], mask=mask_m & mask_k[None, :], other=0.0)
            acc = tl.dot(x, weight, acc, input_precision="ieee")
    if PDL:
        gdc_launch_dependents()
    target = out_ptr + (token.to(tl.int64) * stride_out_token + head * stride_out_head)[:, None]
    tl.store(target + offs_n[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask_m & mask_n)


def head_matmul(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x: [num_tokens, num_heads, in_dim], weight: [num_heads, in_dim, out_dim] → [num_tokens,
    num_heads, out_dim]

    Strides are free but for the last of x and out, which are 1. Sums are float32.
    """
    num_tokens, num_heads, in_dim = x.shape
    out_dim = weight.shape[2]
    if out is None:
        out = torch.empty((num_tokens, num_heads, out_dim), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block_m = min(max(16, triton.next_power_of_2(num_tokens)), MAX_TOKENS)
    # Columns that are adjacent in memory are read in longer pieces.
    block_n = 64 if weight.stride(2) == 1 else 16
    block_k = min(512 if block_m == 16 else 128, max(16, triton.next_power_of_2(in_dim)))
    if x.dtype == torch.float32:
        block_m, block_k = min(block_m, 32), min(block_k, 32)
    options = pdl_options(x.device)
    grid = (triton.cdiv(out_dim, block_n), num_heads, triton.cdiv(num_tokens, block_m))
    launch(_head_matmul_kernel, grid)(
        out,
        x,
        weight,
        num_tokens,
        out.stride(0),
        out.stride(1),
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        weight.stride(1),
        weight.stride(2),
        IN=in_dim,
        OUT=out_dim,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PDL=bool(options),
        num_warps=4,
        num_stages=3,
        **options,
    )
    return out
