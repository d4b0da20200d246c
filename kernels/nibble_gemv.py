"""One token through a layer of 4-bit numbers: gemv.py's pass, with sums on the matrix unit.

    out = residual + norm(x) Wᵀ + bias        or, gated,        out = silu(g) * u of the product

Part i of a word belongs to column i * WIDTH + j. So one tile of words meets 8 stretches of x, and
the matrix unit's short side, 8 wide, takes all of them: of a part's 8 sums one is the right one.
What the numbers have too much (nibbles.py, and zeros) is taken off the sums, in which a product of
ones and x has the sum of x. Scales are applied to sums, too.

Memory: the words once with their scales; x from the L2 cache once a program. Instructions: about
1.5 a number, of which 1 to take words apart, and an eighth for the matrix unit.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launching import gdc_launch_dependents, gdc_wait, pdl_options
from .nibbles import base_of, numbers, run_of_words
from .packed_weight import Packed
from .rehearsal import launch

BLOCK_N = tl.constexpr(16)
"""Outputs a program: the matrix unit's long side."""


@triton.jit
def _right_sums(words, x, column, less):
    """words: [WARPS, BLOCK_N, RUN], x: [WARPS, RUN, 8] → [WARPS, BLOCK_N, 8], in place q the sums
    of part q with column q of x, and `less`."""
    parts = numbers(words, x.dtype)
    sums = tl.dot(parts[0], x, less, input_precision="ieee")
    for part in tl.static_range(1, 8):
        mine = tl.dot(parts[part], x, less, input_precision="ieee")
        sums = tl.where(column == part, mine, sums)
    return sums


@triton.jit
def _nibble_gemv_kernel(
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
    GROUP_SIZE: tl.constexpr,
    ZERO: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    RUN: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program BLOCK_N outputs (and as many gates); each warp takes RUN words in turn."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    warp = tl.arange(0, WARPS)[:, None, None]
    row = output[None, :, None]
    in_n = row < N
    j = tl.arange(0, RUN)[None, None, :]
    # Places of the short side: the part that x is for.
    column = tl.arange(0, 8)[None, None, :]
    value_ptrs = values_ptr + row.to(tl.int64) * stride_values + warp * RUN + j
    above = tl.full([], N, tl.int64) * stride_values
    x_place = tl.arange(0, 8)[None, :, None] * WIDTH + warp * RUN + j
    dtype = x_ptr.dtype.element_ty
    BASE: tl.constexpr = base_of(dtype)
    # Without zeros all of what is too much, else ones in the type's steps.
    LESS: tl.constexpr = BASE if ZERO else BASE + 8
    ones = tl.full([WARPS, BLOCK_N, RUN], -LESS, dtype)
    acc = tl.zeros([WARPS, BLOCK_N, 8], tl.float32)
    up_acc = tl.zeros([WARPS, BLOCK_N, 8], tl.float32)
    squares = tl.zeros([WARPS, 8, RUN], tl.float32)
    for start in tl.range(0, WIDTH, WARPS * RUN, num_stages=STAGES):
        group = (column * WIDTH + warp * RUN + start) // GROUP_SIZE
        words = tl.load(value_ptrs + start, mask=in_n, other=0, eviction_policy="evict_first")
        scale = tl.load(scale_ptr + group * stride_scale + row, mask=in_n, other=0.0)
        if GATED:
            up_words = tl.load(
                value_ptrs + above + start, mask=in_n, other=0, eviction_policy="evict_first"
            )
            up_scale = tl.load(scale_ptr + group * stride_scale + N + row, mask=in_n, other=0.0)
        x = tl.load(x_ptr + x_place + start)
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * tl.load(norm_ptr + x_place + start).to(tl.float32)).to(dtype)
        x = tl.permute(x, (0, 2, 1))
        less = tl.dot(ones, x, input_precision="ieee")
        sums = _right_sums(words, x, column, less)
        if ZERO:
            zero = tl.load(zero_ptr + group * stride_zero + row, mask=in_n, other=0)
            sums += zero.to(tl.float32) * (less * (1.0 / BASE))
        acc += sums * scale.to(tl.float32)
        if GATED:
            sums = _right_sums(up_words, x, column, less)
            if ZERO:
                zero = tl.load(zero_ptr + group * stride_zero + N + row, mask=in_n, other=0)
                sums += zero.to(tl.float32) * (less * (1.0 / BASE))
            up_acc += sums * up_scale.to(tl.float32)
    in_n = output < N
    out = tl.sum(tl.sum(acc, axis=2), axis=0)
    up_out = out
    if GATED:
        up_out = tl.sum(tl.sum(up_acc, axis=2), axis=0)
    if NORM:
        norm_scale = tl.rsqrt(tl.sum(squares) / (WIDTH * 8) + eps)
        out *= norm_scale
        up_out *= norm_scale
    if BIAS:
        out += tl.load(bias_ptr + output, mask=in_n, other=0.0).to(tl.float32)
    if GATED:
        if BIAS:
            up_out += tl.load(bias_ptr + N + output, mask=in_n, other=0.0).to(tl.float32)
        out = out / (1.0 + tl.exp(-out)) * up_out
    if RESIDUAL:
        out += tl.load(residual_ptr + output, mask=in_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + output, out.to(out_ptr.dtype.element_ty), mask=in_n)


class NibbleGemvShape(NamedTuple):
    """How the work is cut."""

    run: int
    """Words of a row that a warp takes at a time, at most"""
    num_warps: int
    """They share a program's columns, at most so many"""
    num_stages: int
    """Tiles of words on their way at once"""


def nibble_gemv_rule(inputs: int, gated: bool) -> NibbleGemvShape:
    """For weights that were not measured; from those of Qwen3-8B on an H200, of which it takes
    45.7 µs a layer where the best cut of each takes 45.3."""
    if inputs >= 8192:
        return NibbleGemvShape(128, 2, 3)
    return NibbleGemvShape(32, 4, 4) if gated else NibbleGemvShape(64, 4, 2)


def nibble_gemv(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    shape: NibbleGemvShape,
) -> torch.Tensor:
    """x: [1, size], last stride 1; weight: of [rows, size] → [1, rows], or gated [1, rows / 2], of
    x's type.

    norm: (weight [size], eps); bias: [rows]; residual: [1, rows], contiguous, not with `gated`.
    x times its norm's weight is rounded to x's type; sums in float32, rounded once. Raises
    ValueError for weights that `run_of_words` has no run of.
    """
    if residual is not None and gated:
        raise ValueError("a gated product takes no residual")
    rows, width = weight.values.shape
    rows = rows // 2 if gated else rows
    run = run_of_words(weight, shape.run)
    if not run:
        raise ValueError(f"no runs of words in {width} a row, {weight.group_size} columns a group")
    runs = width // run
    warps = min(shape.num_warps, runs & -runs)
    out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    options = pdl_options(x.device)
    launch(_nibble_gemv_kernel, (triton.cdiv(rows, BLOCK_N.value),))(
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
        GROUP_SIZE=weight.group_size,
        ZERO=weight.zero is not None,
        NORM=norm is not None,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        RUN=run,
        WARPS=warps,
        STAGES=shape.num_stages,
        PDL=bool(options),
        num_warps=warps,
        **options,
    )
    return out
