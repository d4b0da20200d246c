"""Few tokens through a linear layer, with its epilogue in one pass; bound by reading the weight.

    out = residual + x Wᵀ + bias        or, gated,        out = silu(g) * u of the product

For about 2 to 128 rows of x, and a weight of any format. The weight's rows take the tensor core's
long side and the tokens its short one, so few tokens waste little. A program computes a tile of
outputs over all of K or, with split-K, over a part of it; a tile's last program adds the parts.

A quantized weight is dequantised in registers, directly before the tensor core. With few rows a
group's scale is applied to its sums, exactly; with many rows that would cost more than the product,
so the scale is applied to the numbers, which are rounded to x's type, as a dense weight's are.

Memory: the weight once per BLOCK_M rows; x from the L2 cache once per tile of outputs. Operations:
2 * M per element of the weight; with 4 bits also about 1 instruction per number to unpack it, and
half an instruction each for zeros and scales.

With programmatic dependent launch a program may prefetch its part of the weight, which no kernel
writes, before it waits for the kernel that computes x: the memory stays busy between two products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from ..quant.dequant_tile import dot_part, load_part_scales, unpack_tile
from ..quant.quantized_weight import (
    Weight,
    even_tile,
    values_of,
    weight_arguments,
)
from ..tiles import load_tile, prefetch_l2, split_k_epilogue

MANY_ROWS = tl.constexpr(64)
"""Rows per program from which on scales are applied to numbers."""
SMALLEST_TILE = 16


@triton.jit(do_not_specialize=["M"])
def _small_m_matmul_kernel(
    out_ptr,
    partial_ptr,
    counter_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    M,
    stride_out,
    stride_x,
    stride_weight,
    stride_scale,
    stride_zero,
    stride_residual,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    SPLIT_K: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    EARLY_LAUNCH: tl.constexpr,
):
    """One program: BLOCK_N outputs (and as many gates) of BLOCK_M rows, over 1 / SPLIT_K of K."""
    WIDTH: tl.constexpr = FORMAT.width
    PACK_FACTOR: tl.constexpr = FORMAT.pack_factor
    SPLIT_WIDTH: tl.constexpr = (
        ((WIDTH + SPLIT_K - 1) // SPLIT_K + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    )
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = WIDTH % BLOCK_K == 0
    EVEN_SPLIT: tl.constexpr = WIDTH == SPLIT_WIDTH * SPLIT_K
    SCALE_NUMBERS: tl.constexpr = BLOCK_M >= MANY_ROWS
    SCALE_SUMS: tl.constexpr = FORMAT.grouped and BLOCK_M < MANY_ROWS
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    in_n = offs_n < N
    in_m = offs_m < M
    begin = tl.program_id(2) * SPLIT_WIDTH
    row_ptrs = weight_ptr + offs_n.to(tl.int64) * stride_weight + begin
    up_offset = tl.full([], N, tl.int64) * stride_weight
    if PREFETCH is not None and EVEN_N and EVEN_SPLIT:
        prefetch_l2(row_ptrs, PREFETCH)
        if GATED:
            prefetch_l2(row_ptrs + up_offset, PREFETCH)
    if PDL:
        gdc_wait()
        if EARLY_LAUNCH:
            gdc_launch_dependents()
    weight_ptrs = row_ptrs[:, None] + offs_k[None, :]
    x_ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * stride_x + begin + offs_k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) if GATED else acc
    end = SPLIT_WIDTH
    if FORMAT.quantized or not EVEN_SPLIT:
        # For a quantized weight never a compile-time constant: with one the compiler moves so many
        # addresses out of the loop that it spills registers.
        end = tl.minimum(SPLIT_WIDTH, WIDTH - begin)
    scales = (in_n,)
    up_scales = scales
    scale_ptrs = scale_ptr
    up_scale_ptrs = scale_ptr
    if FORMAT.grouped:
        scale_ptrs = scale_ptr + offs_n // FORMAT.scale_rows
        up_scale_ptrs = scale_ptrs + N
        if FORMAT.scale_rows > 1:
            up_scale_ptrs = scale_ptr + (N + offs_n) // FORMAT.scale_rows
    if SCALE_SUMS:
        # Loaded one iteration ahead: they are too narrow for the compiler to pipeline.
        first = begin if EVEN_SPLIT else tl.minimum(begin, WIDTH - BLOCK_K)
        scales = load_part_scales(scale_ptrs, first, in_n, stride_scale, FORMAT)
        if GATED:
            up_scales = load_part_scales(up_scale_ptrs, first, in_n, stride_scale, FORMAT)
    for start in tl.range(0, end, BLOCK_K, num_stages=STAGES):
        in_k = begin + start + offs_k < WIDTH
        tile = load_tile(weight_ptrs + start, in_n, in_k, EVEN_N, EVEN_K, "")
        tile = unpack_tile(tile, x_ptr.dtype.element_ty, FORMAT)
        if GATED:
            up_tile = load_tile(weight_ptrs + up_offset + start, in_n, in_k, EVEN_N, EVEN_K, "")
            up_tile = unpack_tile(up_tile, x_ptr.dtype.element_ty, FORMAT)
        if SCALE_SUMS:
            ahead = begin + tl.minimum(start + BLOCK_K, end - BLOCK_K)
            next_scales = load_part_scales(scale_ptrs, ahead, in_n, stride_scale, FORMAT)
            if GATED:
                next_up_scales = load_part_scales(up_scale_ptrs, ahead, in_n, stride_scale, FORMAT)
        part_scales = scales
        up_part_scales = up_scales
        if FORMAT.grouped and SCALE_NUMBERS:
            # In the layout of the numbers, loaded where they are needed.
            part_scales = load_part_scales(scale_ptrs, begin + start, in_n, stride_scale, FORMAT)
            if GATED:
                up_part_scales = load_part_scales(
                    up_scale_ptrs, begin + start, in_n, stride_scale, FORMAT
                )
        for part in tl.static_range(PACK_FACTOR):
            x = load_tile(x_ptrs + part * WIDTH + start, in_m, in_k, False, EVEN_K, "")
            group = (part * WIDTH + begin + start) // FORMAT.group_size
            acc = dot_part(
                acc, tile, x, part_scales, scale_ptr, zero_ptr, offs_n, in_n, group, stride_scale,
                stride_zero, part, FORMAT, SCALE_NUMBERS, False,
            )  # fmt: skip
            if GATED:
                up_acc = dot_part(
                    up_acc, up_tile, x, up_part_scales, scale_ptr, zero_ptr, N + offs_n, in_n,
                    group, stride_scale, stride_zero, part, FORMAT, SCALE_NUMBERS, False,
                )  # fmt: skip
        if SCALE_SUMS:
            scales = next_scales
            if GATED:
                up_scales = next_up_scales
    if PDL and not EARLY_LAUNCH:
        gdc_launch_dependents()
    if FORMAT.quantized and not FORMAT.grouped:
        scale = tl.load(scale_ptr + offs_n // FORMAT.scale_rows, mask=in_n, other=0.0)
        acc *= scale.to(tl.float32)[:, None]
        if GATED:
            scale = tl.load(scale_ptr + (N + offs_n) // FORMAT.scale_rows, mask=in_n, other=0.0)
            up_acc *= scale.to(tl.float32)[:, None]
    split_k_epilogue(
        acc, up_acc, out_ptr, partial_ptr, counter_ptr, bias_ptr, residual_ptr, M, stride_out,
        stride_residual, offs_n, offs_m, N, SPLIT_K, GATED, BIAS, RESIDUAL,
    )  # fmt: skip


class SmallMConfig(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    """Most elements (numbers, or words) of a weight's row at a time"""
    split_k: int
    """Programs that share a tile of outputs; at most, for a quantized weight"""
    num_warps: int
    num_stages: int
    prefetch: int = 0
    """Bytes that a program prefetches of each of its rows."""
    early: bool = True
    """Whether the next kernel may start at once, not only when this one has read its weight."""
    max_registers: int | None = None
    """Most registers per thread, to leave room for the next kernel's programs; None: no limit."""


class SplitKWorkspace(NamedTuple):
    """Memory for partial sums, reused by each product."""

    floats: torch.Tensor
    """[at least `split_k_floats(...)`] float32, contents free."""
    counters: torch.Tensor
    """[at least `MAX_TILES`] int32, zeros before and after."""


MAX_TILES = 4096
"""Most output tiles of a product with split-K."""


def split_k_floats(num_rows: int, outputs: int, split_k: int, gated: bool) -> int:
    """Return the floats that a product needs in its workspace. `outputs`: without the gates."""
    return num_rows * outputs * split_k * (2 if gated else 1) if split_k > 1 else 0


def small_m_matmul(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    config: SmallMConfig,
    workspace: SplitKWorkspace | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: [M, K], last stride 1; weight: [N, K] → [M, N], or gated [M, N / 2], of x's type.

    bias: [N]; residual: as the result, not with `gated`; `out` may be the residual. Sums in
    float32, rounded once. `workspace`: needed if `config.split_k` is above 1. Raises ValueError for
    4-bit floats, and if the weight's groups are too narrow for the tensor core.
    """
    num_rows = x.shape[0]
    values = values_of(weight)
    rows, width = values.shape
    outputs = rows // 2 if gated else rows
    if residual is not None and gated:
        raise ValueError("a gated product takes no residual")
    block_k, split_k = config.block_k, config.split_k
    if not isinstance(weight, torch.Tensor):
        if weight.e2m1_run is not None:
            raise ValueError("4-bit floats are for quant_matmul")
        block_k = even_tile(weight, block_k)
        if not weight.grouped:
            block_k = max(block_k, SMALLEST_TILE)
        elif block_k < SMALLEST_TILE:
            raise ValueError(f"groups of {weight.group_size} leave tiles of {block_k} columns")
        split_k = min(split_k, triton.cdiv(width, block_k))
    tiles = triton.cdiv(outputs, config.block_n), triton.cdiv(num_rows, config.block_m)
    if split_k > 1:
        needed = split_k_floats(num_rows, outputs, split_k, gated)
        if workspace is None or workspace.floats.numel() < needed:
            raise ValueError(f"split_k={split_k} needs a workspace of {needed} floats")
        if tiles[0] * tiles[1] > workspace.counters.numel():
            raise ValueError(f"{tiles[0] * tiles[1]} tiles of outputs need as many counters")
    if out is None:
        out = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    options = pdl_options(x.device)
    dependent = bool(options)
    split_width = triton.cdiv(triton.cdiv(width, split_k), block_k) * block_k
    prefetch = min(config.prefetch, split_width * values.element_size()) // 16 * 16
    if config.max_registers is not None:
        options = {**options, "maxnreg": config.max_registers}
    arguments = weight_arguments(weight)
    launch(_small_m_matmul_kernel, (*tiles, split_k))(
        out,
        workspace.floats if workspace is not None else out,
        workspace.counters if workspace is not None else out,
        x,
        *arguments.tensors,
        bias,
        residual,
        num_rows,
        out.stride(0),
        x.stride(0),
        *arguments.strides,
        0 if residual is None else residual.stride(0),
        N=outputs,
        FORMAT=arguments.format,
        SPLIT_K=split_k,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        STAGES=config.num_stages,
        PREFETCH=str(prefetch) if prefetch and dependent else None,
        PDL=dependent,
        EARLY_LAUNCH=config.early,
        num_warps=config.num_warps,
        **options,
    )
    return out
