"""Dequantization of a whole weight, for products with many tokens.

Memory: reads N * K * bits / 8 bytes and the scales, writes N * K elements, the bound: a product
with some thousand tokens takes many times as long.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from .dequant_tile import dequant_tile, load_zero, part_column
from .quantized_weight import QuantizedWeight, weight_arguments

BLOCK_N, BLOCK_K = 8, 128


@triton.jit
def _dequantize_weight_kernel(
    out_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    stride_weight,
    stride_scale,
    stride_zero,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_N rows of BLOCK_K elements, all their parts."""
    WIDTH: tl.constexpr = FORMAT.width
    PACK_FACTOR: tl.constexpr = FORMAT.pack_factor
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    in_n = offs_n < N
    mask = in_n[:, None] & (offs_k < WIDTH)
    rows = offs_n.to(tl.int64)[:, None]
    tile = tl.load(weight_ptr + rows * stride_weight + offs_k, mask=mask, other=0.0)
    for part in tl.static_range(PACK_FACTOR):
        columns = part_column(offs_k, part, FORMAT)
        group = columns // FORMAT.group_size
        scale = tl.load(
            scale_ptr + group * stride_scale + offs_n[:, None] // FORMAT.scale_rows,
            mask=mask,
            other=0.0,
        )
        if FORMAT.has_zero:
            zero = tl.load(zero_ptr + group * stride_zero + offs_n[:, None], mask=mask, other=0)
            zero = zero.to(tl.float32)
        else:
            zero = load_zero(zero_ptr, offs_n, in_n, group, stride_zero, FORMAT)
        # Scales vary within the tile, so they are applied here.
        value = dequant_tile(tile, zero, zero, part, tl.float32, FORMAT, False)
        value *= scale.to(tl.float32)
        out_ptrs = out_ptr + rows * (WIDTH * PACK_FACTOR) + columns
        tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=mask)


def dequantize_weight(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight as [N, K] of `dtype`, contiguous; computed in float32, rounded once."""
    rows, width = weight.values.shape
    out = torch.empty((rows, weight.in_features), dtype=dtype, device=weight.values.device)
    arguments = weight_arguments(weight)
    launch(_dequantize_weight_kernel, (triton.cdiv(rows, BLOCK_N), triton.cdiv(width, BLOCK_K)))(
        out,
        *arguments.tensors,
        *arguments.strides,
        N=rows,
        FORMAT=arguments.format,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=4,
    )
    return out
