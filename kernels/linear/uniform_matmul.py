"""A linear layer in which a row's result has the same bits, however many rows there are.

    out = residual + x Wᵀ + bias        or, gated,        out = silu(g) * u of the product

All rows have tiles of one size, and a tile's sums over K are added as parts, p0 + p1 + …, each from
zero. Where rows are few, a program computes one part, and the last of a tile's programs adds them:
so a narrow weight is read by many programs. Where rows are many, a program computes the parts one
after the other, and adds them in the same order.

Memory: the weight once per BLOCK_M rows, from the L2 cache for GROUP tiles of rows side by side; x
once per tile of outputs. Operations: 2 * M per element of the weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from ..tiles import load_tile, split_k_epilogue
from .small_m_matmul import MAX_TILES, SplitKWorkspace, split_k_floats

GROUP = tl.constexpr(8)
"""Tiles of rows that are computed side by side."""
FEW_ROWS = 64
"""Most rows whose parts have programs of their own."""


@triton.jit
def _part(
    weight_ptrs,
    up_offset,
    x_ptrs,
    begin,
    in_n,
    in_m,
    WIDTH: tl.constexpr,
    PART_WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the sums over columns [begin, begin + PART_WIDTH), [BLOCK_N, BLOCK_M]; of gates and
    of what they gate."""
    offs_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) if GATED else acc
    for start in tl.range(0, PART_WIDTH, BLOCK_K, num_stages=STAGES):
        k = begin + start
        in_k = k + offs_k < WIDTH
        x = load_tile(x_ptrs + k, in_m, in_k, False, EVEN_K, "")
        tile = load_tile(weight_ptrs + k, in_n, in_k, EVEN_N, EVEN_K, "")
        acc = tl.dot(tile, tl.trans(x), acc, input_precision="ieee")
        if GATED:
            up_tile = load_tile(weight_ptrs + up_offset + k, in_n, in_k, EVEN_N, EVEN_K, "")
            up_acc = tl.dot(up_tile, tl.trans(x), up_acc, input_precision="ieee")
    return acc, up_acc


@triton.jit(do_not_specialize=["M"])
def _uniform_matmul_kernel(
    out_ptr,
    partial_ptr,
    counter_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    M,
    stride_out,
    stride_x,
    stride_weight,
    stride_residual,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    PARALLEL: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N outputs (and as many gates) of BLOCK_M rows; with PARALLEL, one part."""
    PART_WIDTH: tl.constexpr = ((WIDTH + PARTS - 1) // PARTS + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = WIDTH == PART_WIDTH * PARTS
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    first = tl.program_id(0) // (GROUP * TILES_N) * GROUP
    together = tl.minimum((M + BLOCK_M - 1) // BLOCK_M - first, GROUP)
    within = tl.program_id(0) % (GROUP * TILES_N)
    offs_m = (first + within % together) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = within // together * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    in_m = offs_m < M
    in_n = offs_n < N
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    weight_ptrs = weight_ptr + offs_n.to(tl.int64)[:, None] * stride_weight + offs_k[None, :]
    up_offset = tl.full([], N, tl.int64) * stride_weight
    x_ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * stride_x + offs_k[None, :]
    if PARALLEL:
        acc, up_acc = _part(
            weight_ptrs, up_offset, x_ptrs, tl.program_id(2) * PART_WIDTH, in_n, in_m, WIDTH,
            PART_WIDTH, GATED, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, STAGES,
        )  # fmt: skip
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) if GATED else acc
        for number in tl.range(0, PARTS, num_stages=1):
            sums, up_sums = _part(
                weight_ptrs, up_offset, x_ptrs, number * PART_WIDTH, in_n, in_m, WIDTH, PART_WIDTH,
                GATED, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, STAGES,
            )  # fmt: skip
            acc += sums
            if GATED:
                up_acc += up_sums
    split_k_epilogue(
        acc, up_acc, out_ptr, partial_ptr, counter_ptr, bias_ptr, residual_ptr, M, stride_out,
        stride_residual, offs_n, offs_m, N, PARTS if PARALLEL else 1, GATED, BIAS, RESIDUAL,
    )  # fmt: skip


class UniformConfig(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    parts: int
    """Sums over K that are added to one"""
    num_warps: int
    num_stages: int


def uniform_config(weight: torch.Tensor, gated: bool) -> UniformConfig:
    """Return the tiles and parts of a product, by its weight alone. A narrow weight has as many
    parts as keep a GPU's memory busy with few rows."""
    rows, width = weight.shape
    if weight.dtype == torch.float32:
        return UniformConfig(32, 32 if gated else 64, 32, 1, 4, 2)
    if gated:
        return UniformConfig(64, 64, 64, 1, 4, 4)
    if rows >= 12288:
        return UniformConfig(128, 128, 64, 1, 8, 4)
    parts = 1
    while parts < 4 and triton.cdiv(rows, 64) * parts < 256 and width >= 2048 * parts:
        parts *= 2
    return UniformConfig(128, 64, 64, parts, 4, 4)


def uniform_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    config: UniformConfig | None = None,
    workspace: SplitKWorkspace | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: [M, K], last stride 1; weight: [N, K] → [M, N], or gated [M, N / 2], of x's type.

    bias: [N]; residual: as the result, not with `gated`; `out` may be the residual. Sums in
    float32, rounded once. Without a `workspace`, or where it is too small, a program computes all
    parts of its tile: the result is the same.
    """
    config = config or uniform_config(weight, gated)
    num_rows, (rows, width) = x.shape[0], weight.shape
    outputs = rows // 2 if gated else rows
    if out is None:
        out = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tiles = triton.cdiv(outputs, config.block_n) * triton.cdiv(num_rows, config.block_m)
    needed = split_k_floats(num_rows, outputs, config.parts, gated)
    parallel = (
        workspace is not None
        and config.parts > 1
        and num_rows <= FEW_ROWS
        and needed <= workspace.floats.numel()
        and tiles <= MAX_TILES
    )
    options = pdl_options(x.device)
    launch(_uniform_matmul_kernel, (tiles, 1, config.parts if parallel else 1))(
        out,
        workspace.floats if workspace is not None else out,
        workspace.counters if workspace is not None else out,
        x,
        weight,
        bias,
        residual,
        num_rows,
        out.stride(0),
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        N=outputs,
        WIDTH=width,
        PARTS=config.parts,
        PARALLEL=parallel,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        PDL=bool(options),
        num_warps=config.num_warps,
        **options,
    )
    return out
