"""Products with several tokens and a weight of 8 bits, or of words whose numbers need float32.

Separate from small_m_matmul.py because a wide fp8 weight is faster with tokens on the tensor core's
long side (docs/benchmarks/journal.md). Numbers are converted to x's type exactly; a group's scale
is applied to the tile's float32 product. If few tokens give few programs, K is split into partial
sums, which split_k_sum.py adds up.

Memory: the weight once per BLOCK_M tokens, x once per BLOCK_N outputs (from the L2 cache); split, 4
bytes per output and split, written and read. Operations: 2 * M * N * K.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..quant.dequant_tile import dequant_tile, load_zero, part_column
from ..quant.quantized_weight import QuantizedWeight, largest_tile, weight_arguments
from .split_k_sum import split_k_sum

MAX_SPLIT_K = 8
SMALLEST_TILE = 16


@triton.jit
def _quant_matmul_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    M,
    stride_split,
    stride_x,
    stride_weight,
    stride_scale,
    stride_zero,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_M tokens, BLOCK_N outputs and one of SPLIT_K runs of tiles."""
    WIDTH: tl.constexpr = FORMAT.width
    PACK_FACTOR: tl.constexpr = FORMAT.pack_factor
    if FORMAT.run is not None:
        stride_weight = WIDTH  # No gaps: of a constant the compiler knows the alignment.
    TILES: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    SPLIT_TILES: tl.constexpr = (TILES + SPLIT_K - 1) // SPLIT_K
    EVEN_K: tl.constexpr = WIDTH % BLOCK_K == 0
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    offs_k = tl.arange(0, BLOCK_K)
    in_m = offs_m < M
    in_n = offs_n < N
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    weight_ptrs = weight_ptr + offs_n.to(tl.int64)[:, None] * stride_weight + offs_k[None, :]
    x_ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * stride_x + offs_k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for number in range(split * SPLIT_TILES, tl.minimum((split + 1) * SPLIT_TILES, TILES)):
        start = number * BLOCK_K
        in_k = start + offs_k < WIDTH
        tile = tl.load(weight_ptrs + start, mask=in_n[:, None] & in_k[None, :], other=0.0)
        for part in tl.static_range(PACK_FACTOR):
            k = part_column(start, part, FORMAT)
            mask_x = in_m[:, None]
            if not EVEN_K:
                mask_x = mask_x & in_k[None, :]
            x = tl.load(x_ptrs + k, mask=mask_x, other=0.0)
            group = k // FORMAT.group_size
            zero = load_zero(zero_ptr, offs_n, in_n, group, stride_zero, FORMAT)
            # Through float32: words here may hold numbers of 8 bits, or x may be float32.
            value = dequant_tile(tile, zero, zero, part, tl.float32, FORMAT, False)
            product = tl.dot(x, tl.trans(value.to(dtype)), input_precision="ieee")
            if FORMAT.grouped:
                scale_ptrs = scale_ptr + group * stride_scale + offs_n // FORMAT.scale_rows
                scale = tl.load(scale_ptrs, mask=in_n, other=0.0).to(tl.float32)
                product *= scale[None, :]
            acc += product
    if not FORMAT.grouped:
        scale = tl.load(scale_ptr + offs_n // FORMAT.scale_rows, mask=in_n, other=0.0)
        acc *= scale.to(tl.float32)[None, :]
    offsets = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    mask = in_m[:, None] & in_n[None, :]
    if SPLIT_K > 1:
        tl.store(out_ptr + split.to(tl.int64) * stride_split + offsets, acc, mask=mask)
        return
    if BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        acc += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


class QuantMatmulConfig(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    """Elements of a row (bytes, or words) at a time, at most"""
    split_k: int
    num_warps: int
    num_stages: int


def quant_matmul_config(
    num_tokens: int, weight: QuantizedWeight, num_sms: int
) -> QuantMatmulConfig:
    """Return tiles such that those in flight fit a multiprocessor's shared memory, twice if tokens
    are few.
    """
    outputs, width = weight.values.shape
    block_m = min(max(triton.next_power_of_2(num_tokens), 16), 64)
    few = block_m == 16
    block_n = 32 if few else 64
    if weight.pack_factor > 1:
        block_k, num_stages = (64, 4) if few else (32, 3)
    else:
        block_k, num_stages = (256, 4) if few else (128, 4)
    programs = triton.cdiv(outputs, block_n) * triton.cdiv(num_tokens, block_m)
    split_k = min(max(num_sms // programs, 1), MAX_SPLIT_K, max(width // (4 * block_k), 1))
    return QuantMatmulConfig(block_m, block_n, block_k, split_k, 4, num_stages)


def uniform_config(weight: QuantizedWeight) -> QuantMatmulConfig:
    """Return the tiles for any number of tokens, without partial sums: a token's results then do
    not depend on how many there are."""
    return quant_matmul_config(64, weight, 1)


def quant_matmul(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    num_sms: int = 132,
    config: QuantMatmulConfig | None = None,
) -> torch.Tensor:
    """x: [M, K], last stride 1; weight: [N, K] → [M, N] of x's type.

    bias: [N]; residual: [M, N], contiguous. Raises ValueError if the groups are too narrow for the
    tensor core (`quant_matmul_supports`).
    """
    num_tokens = x.shape[0]
    outputs = weight.values.shape[0]
    out = torch.empty((num_tokens, outputs), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    config = config or quant_matmul_config(num_tokens, weight, num_sms)
    block_k = largest_tile(weight, config.block_k)
    if not weight.grouped:
        block_k = max(block_k, SMALLEST_TILE)
    if block_k < SMALLEST_TILE:
        raise ValueError(f"groups of {weight.group_size} leave tiles of {block_k} columns")
    split_k = config.split_k
    partial = out
    if split_k > 1:
        partial = torch.empty((split_k, num_tokens, outputs), dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(outputs, config.block_n), triton.cdiv(num_tokens, config.block_m)
    arguments = weight_arguments(weight)
    launch(_quant_matmul_kernel, (*tiles, split_k))(
        partial,
        x,
        *arguments.tensors,
        bias,
        residual,
        num_tokens,
        num_tokens * outputs,
        x.stride(0),
        *arguments.strides,
        N=outputs,
        FORMAT=arguments.format,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        SPLIT_K=split_k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if split_k > 1:
        split_k_sum(partial, out, bias, residual=residual)
    return out


def quant_matmul_supports(weight: QuantizedWeight) -> bool:
    return not weight.grouped or largest_tile(weight, SMALLEST_TILE) >= SMALLEST_TILE
