"""One token through a linear layer with 4-bit weights: as gemv.py, with sums on the tensor core.

    out = residual + norm(x) Wᵀ + bias        or, gated,        out = silu(g) * u of the product

Each int32 word holds 8 columns, WIDTH apart, so a tile needs 8 slices of x; they fill the MMA's
N = 8. Only the diagonal (part i times slice i) is kept. The base that `unpack_int4` adds to each
number, and the zeros, are subtracted from the sums: each is a constant times the sum of x.
Scales are applied to sums, too. Of floats, the columns of a word are a run apart.

Memory: the words once with their scales; x from the L2 cache once per program.
Instructions: about 1.5 per number (2.5 for a float), of which 1 unpacks words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from ..quant.diagonal_sums import scaled_sums, word_constants
from ..quant.int4_unpack import int4_tile
from ..quant.quantized_weight import QuantizedWeight
from ..tiles import load_pair, row_epilogue

BLOCK_N = tl.constexpr(16)
"""Outputs per program: the MMA's long side."""


@triton.jit
def _int4_gemv_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    eps,
    stride_weight,
    stride_scale,
    stride_zero,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    FLOATS: tl.constexpr,
    ZERO: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N outputs (and as many gates); each warp takes BLOCK_K words in turn."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    warp = tl.arange(0, WARPS)[:, None, None]
    rows = offs_n[None, :, None]
    in_n = rows < N
    offs_k = tl.arange(0, BLOCK_K)[None, None, :]
    # The short side: one slice of x per part of a word.
    offs_part = tl.arange(0, 8)[None, None, :]
    weight_ptrs = weight_ptr + rows.to(tl.int64) * stride_weight + warp * BLOCK_K + offs_k
    up_offset = tl.full([], N, tl.int64) * stride_weight
    # From slice to slice, and from word to word where a tile begins.
    SLICE: tl.constexpr = BLOCK_K if FLOATS else WIDTH
    STEP: tl.constexpr = 8 if FLOATS else 1
    offs_x = tl.arange(0, 8)[None, :, None] * SLICE + warp * (BLOCK_K * STEP) + offs_k
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    constants = word_constants(dtype, ZERO, 8, WARPS, BLOCK_N, BLOCK_K)
    acc = tl.zeros([WARPS, BLOCK_N, 8], tl.float32)
    up_acc = tl.zeros([WARPS, BLOCK_N, 8], tl.float32)
    squares = tl.zeros([WARPS, 8, BLOCK_K], tl.float32)
    correction = tl.zeros([WARPS, BLOCK_N, 8], tl.float32)
    for start in tl.range(0, WIDTH, WARPS * BLOCK_K, num_stages=STAGES):
        group = (offs_part * SLICE + warp * (BLOCK_K * STEP) + start * STEP) // GROUP_SIZE
        words = tl.load(weight_ptrs + start, mask=in_n, other=0, eviction_policy="evict_first")
        scale = tl.load(scale_ptr + group * stride_scale + rows, mask=in_n, other=0.0)
        if GATED:
            up_words = tl.load(
                weight_ptrs + up_offset + start, mask=in_n, other=0, eviction_policy="evict_first"
            )
            up_scale = tl.load(scale_ptr + group * stride_scale + N + rows, mask=in_n, other=0.0)
        x = tl.load(x_ptr + offs_x + start * STEP)
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * tl.load(norm_ptr + offs_x + start * STEP).to(tl.float32)).to(dtype)
        x = tl.permute(x, (0, 2, 1))
        if not FLOATS:
            correction = tl.dot(constants, x, input_precision="ieee")
        zero_ptrs = zero_ptr
        if ZERO:
            zero_ptrs = zero_ptr + group * stride_zero + rows
        acc += scaled_sums(words, x, scale, zero_ptrs, in_n, offs_part, correction, FLOATS, ZERO)
        if GATED:
            if ZERO:
                zero_ptrs += N
            up_acc += scaled_sums(
                up_words, x, up_scale, zero_ptrs, in_n, offs_part, correction, FLOATS, ZERO
            )
    out = tl.sum(tl.sum(acc, axis=2), axis=0)
    up_out = out
    if GATED:
        up_out = tl.sum(tl.sum(up_acc, axis=2), axis=0)
    if NORM:
        norm_scale = tl.rsqrt(tl.sum(squares) / (WIDTH * 8) + eps)
        out *= norm_scale
        up_out *= norm_scale
    inside = offs_n < N
    bias, up_bias = load_pair(bias_ptr, offs_n, inside, N, GATED, BIAS)
    residual, _ = load_pair(residual_ptr, offs_n, inside, N, False, RESIDUAL)
    row_epilogue(out, up_out, out_ptr, bias, up_bias, residual, offs_n, N, GATED, "", 1.0)


class Int4GemvConfig(NamedTuple):
    block_k: int
    """Most words of a row that a warp takes at a time"""
    num_warps: int
    """Most warps that share a program's columns"""
    num_stages: int


def int4_gemv_rule(inputs: int, gated: bool) -> Int4GemvConfig:
    """Return the tiles for weights that were not measured."""
    if inputs >= 8192:
        return Int4GemvConfig(128, 2, 3)
    return Int4GemvConfig(32, 4, 4) if gated else Int4GemvConfig(64, 4, 2)


def int4_gemv(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    config: Int4GemvConfig,
) -> torch.Tensor:
    """x: [1, K], last stride 1; weight: [N, K] → [1, N], or gated [1, N / 2], of x's type.

    norm: (weight [K], eps); bias: [N]; residual: [1, N], contiguous, not with `gated`. x times its
    norm's weight is rounded to x's type; sums in float32, rounded once. Raises ValueError for
    weights that `int4_tile` has no tile for.
    """
    if residual is not None and gated:
        raise ValueError("a gated product takes no residual")
    rows, width = weight.values.shape
    outputs = rows // 2 if gated else rows
    block_k = int4_tile(weight, config.block_k)
    if not block_k:
        raise ValueError(
            f"no tile for {width} words per row, {weight.group_size} columns per group"
        )
    tiles = width // block_k
    warps = min(config.num_warps, tiles & -tiles)
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    options = pdl_options(x.device)
    launch(_int4_gemv_kernel, (triton.cdiv(outputs, BLOCK_N.value),))(
        out,
        x,
        weight.values,
        weight.scale,
        weight.zero,
        bias,
        None if norm is None else norm[0],
        residual,
        0.0 if norm is None else norm[1],
        weight.values.stride(0),
        weight.scale.stride(0),
        0 if weight.zero is None else weight.zero.stride(0),
        N=outputs,
        WIDTH=width,
        GROUP_SIZE=weight.group_size,
        FLOATS=weight.e2m1_run is not None,
        ZERO=weight.zero is not None,
        NORM=norm is not None,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        BLOCK_K=block_k,
        WARPS=warps,
        STAGES=config.num_stages,
        PDL=bool(options),
        num_warps=warps,
        **options,
    )
    return out
