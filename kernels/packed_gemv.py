"""One token through a quantized linear layer: gemv.py's pass, over fewer bytes.

    out = residual + norm(x) Wᵀ + bias        or, gated,        out = silu(g) * u of the product

The weight is dequantised in registers; inputs stay as they are, so nothing is rounded but the
weight. Memory: the packed weight once, with its scales (rows * size * bits / 8 bytes, and 2 to 4
bytes a group); x from the L2 cache once a program. Operations: 2 an element of the weight, and for
words about 2 more to take them apart: at 4 bits near the rate of a chip's plain arithmetic.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .gemv import EARLY_BYTES
from .launching import gdc_launch_dependents, gdc_wait, pdl_options
from .packed_weight import Packed, largest_tile, part_as_float, part_unit
from .rehearsal import launch


@triton.jit
def _scale_and_zero(
    scale_ptr,
    zero_ptr,
    group,
    row,
    in_n,
    stride_scale,
    stride_zero,
    SCALE_ROWS: tl.constexpr,
    ZERO: tl.constexpr,
):
    """→ scale and zero of these rows in one group, [BLOCK_N] float32"""
    scale = tl.load(scale_ptr + group * stride_scale + row // SCALE_ROWS, mask=in_n, other=0.0)
    scale = scale.to(tl.float32)
    zero = tl.zeros_like(scale)
    if ZERO:
        zero = tl.load(zero_ptr + group * stride_zero + row, mask=in_n, other=0).to(tl.float32)
    return scale, zero


@triton.jit
def _packed_gemv_kernel(
    out_ptr,
    x_ptr,
    values_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    eps,
    stride_values,
    stride_scale,
    stride_zero,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUPED: tl.constexpr,
    ZERO: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program BLOCK_N outputs (and as many gates); WIDTH elements a row, PARTS columns each."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_n = row < N
    EVEN: tl.constexpr = N % BLOCK_N == 0 and WIDTH % BLOCK_K == 0
    EVEN_K: tl.constexpr = WIDTH % BLOCK_K == 0
    HALVES: tl.constexpr = 2 if GATED else 1
    # Numbers of a run share a scale: they are summed first, in one thread's registers.
    RUN: tl.constexpr = 4 if PARTS > 1 and BLOCK_K >= 4 else 1
    SUMS: tl.constexpr = BLOCK_K // RUN
    LARGEST_UNIT: tl.constexpr = 256 if PARTS > 1 else 1
    ptrs = values_ptr + row.to(tl.int64)[:, None] * stride_values + k[None, :]
    up_ptrs = ptrs + tl.full([], N, tl.int64) * stride_values
    acc = tl.zeros([BLOCK_N, SUMS], tl.float32)
    up_acc = tl.zeros([BLOCK_N, SUMS], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    if PDL and EARLY:
        gdc_launch_dependents()
    for base in range(0, WIDTH, BLOCK_K * UNROLL):
        for step in tl.static_range(UNROLL):
            start = base + step * BLOCK_K
            if EVEN:
                tile = tl.load(ptrs + start, eviction_policy="evict_first")
            else:
                mask = in_n[:, None] & (start + k < WIDTH)[None, :]
                tile = tl.load(ptrs + start, mask=mask, other=0.0, eviction_policy="evict_first")
            up = tile
            if GATED:
                if EVEN:
                    up = tl.load(up_ptrs + start, eviction_policy="evict_first")
                else:
                    up = tl.load(
                        up_ptrs + start, mask=mask, other=0.0, eviction_policy="evict_first"
                    )
            if PDL and step == 0:
                if base == 0:
                    gdc_wait()
            for part in tl.static_range(PARTS):
                column = part * WIDTH + start
                if EVEN_K:
                    x = tl.load(x_ptr + column + k).to(tl.float32)
                else:
                    x = tl.load(x_ptr + column + k, mask=start + k < WIDTH, other=0.0)
                    x = x.to(tl.float32)
                if NORM:
                    squares += x * x
                    if EVEN_K:
                        weight = tl.load(norm_ptr + column + k)
                    else:
                        weight = tl.load(norm_ptr + column + k, mask=start + k < WIDTH, other=0.0)
                    x *= weight.to(tl.float32)
                if PARTS > 1:
                    # Words come as 1 + number / unit; the largest unit is multiplied by at the end.
                    x *= part_unit(part, BITS) / LARGEST_UNIT
                for half in tl.static_range(HALVES):
                    source = up if half == 1 else tile
                    if PARTS == 1:
                        value = source.to(tl.float32)
                    else:
                        value = part_as_float(source, part, BITS)
                    product = value * x[None, :]
                    if GROUPED or ZERO or PARTS > 1:
                        scale, zero = _scale_and_zero(
                            scale_ptr,
                            zero_ptr,
                            column // GROUP_SIZE,
                            row + half * N,
                            in_n,
                            stride_scale,
                            stride_zero,
                            SCALE_ROWS,
                            ZERO,
                        )
                        inputs = x
                        if RUN > 1:
                            product = tl.sum(tl.reshape(product, [BLOCK_N, SUMS, RUN]), axis=2)
                            inputs = tl.sum(tl.reshape(x, [SUMS, RUN]), axis=1)
                        if PARTS == 1:
                            product -= zero[:, None] * inputs[None, :]
                        elif ZERO:
                            offset = 1.0 + zero / part_unit(part, BITS)
                            product -= offset[:, None] * inputs[None, :]
                        else:
                            product -= (inputs * (1.0 + OFFSET / part_unit(part, BITS)))[None, :]
                        product *= scale[:, None]
                    if half == 1:
                        up_acc += product
                    else:
                        acc += product
    if PDL and not EARLY:
        gdc_launch_dependents()
    out = tl.sum(acc, axis=1) * LARGEST_UNIT
    up_out = tl.sum(up_acc, axis=1) * LARGEST_UNIT
    if not (GROUPED or ZERO or PARTS > 1):
        out *= tl.load(scale_ptr + row // SCALE_ROWS, mask=in_n, other=0.0).to(tl.float32)
        if GATED:
            up_scale = tl.load(scale_ptr + (N + row) // SCALE_ROWS, mask=in_n, other=0.0)
            up_out *= up_scale.to(tl.float32)
    if NORM:
        norm_scale = tl.rsqrt(tl.sum(squares, axis=0) / (WIDTH * PARTS) + eps)
        out *= norm_scale
        up_out *= norm_scale
    if BIAS:
        out += tl.load(bias_ptr + row, mask=in_n, other=0.0).to(tl.float32)
    if GATED:
        if BIAS:
            up_out += tl.load(bias_ptr + N + row, mask=in_n, other=0.0).to(tl.float32)
        out = out / (1.0 + tl.exp(-out)) * up_out
    if RESIDUAL:
        out += tl.load(residual_ptr + row, mask=in_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=in_n)


class PackedGemvShape(NamedTuple):
    """How the work is cut."""

    block_n: int
    """Outputs a program"""
    block_k: int
    """Elements of a row (bytes, or words) at a time, at most"""
    num_warps: int


def packed_gemv_shape(rows: int, width: int, words: bool, gated: bool) -> PackedGemvShape:
    """For `rows` outputs of `width` elements each.

    From a sweep over the layers of Qwen3-8B in fp8 and in words of eight 4-bit numbers, on an H200.
    """
    if words:
        # With one warp, a row of a tile is one load of the warp, and inputs lie as the tile does.
        return PackedGemvShape(2 if width >= 1024 else 4, 128, 1)
    if rows <= 2048 and not gated:
        return PackedGemvShape(1, 2048, 4)
    if rows <= 4096 and not gated:
        return PackedGemvShape(4, 2048, 2)
    return PackedGemvShape(4, 4096, 4)


def _unroll(tiles: int, parts: int) -> int:
    """Tiles of a turn of the loop: all, unless so many parts would make a program of megabytes."""
    if parts == 1 and tiles <= 16:
        return tiles
    return next(count for count in (4, 3, 2, 1) if tiles % count == 0)


def packed_gemv(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    shape: PackedGemvShape | None = None,
) -> torch.Tensor:
    """x: [1, size], last stride 1; weight: of [rows, size] → [1, rows], or gated [1, rows / 2], of
    x's type.

    norm: (weight [size], eps); bias: [rows]; residual: [1, rows], contiguous, not with `gated`.
    Sums in float32, rounded once.
    """
    if residual is not None and gated:
        raise ValueError("a gated product takes no residual")
    rows, width = weight.values.shape
    rows = rows // 2 if gated else rows
    shape = shape or packed_gemv_shape(rows, width, weight.parts > 1, gated)
    out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    block_k = largest_tile(weight, shape.block_k)
    options = pdl_options(x.device)
    launch(_packed_gemv_kernel, (triton.cdiv(rows, shape.block_n),))(
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
        N=rows,
        WIDTH=width,
        PARTS=weight.parts,
        BITS=weight.bits,
        GROUP_SIZE=weight.group_size,
        SCALE_ROWS=weight.scale_rows,
        OFFSET=weight.offset,
        GROUPED=weight.grouped,
        ZERO=weight.zero is not None,
        NORM=norm is not None,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        BLOCK_N=shape.block_n,
        BLOCK_K=block_k,
        UNROLL=_unroll(triton.cdiv(width, block_k), weight.parts),
        PDL=bool(options),
        EARLY=weight.values.nbytes >= EARLY_BYTES,
        num_warps=shape.num_warps,
        **options,
    )
    return out
