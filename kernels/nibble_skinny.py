"""Some tokens through a layer of 4-bit numbers: skinny.py's pass, over a quarter of the bytes.

    out = residual + x Wᵀ + bias        or, gated,        out = silu(g) * u of the product

For some 2 to 128 rows. The weight's rows take the matrix unit's long side, straight from registers
where words were taken apart. With few rows a group's scale is applied to its sums, exactly; with
many that would cost more than the product, and it is applied to the numbers, each rounded to x's
type, as a dense weight's are. Programs may share outputs, as in skinny.py. Memory: the words once
for each BLOCK_M rows; x from the L2 cache once a band of outputs. Instructions: about 1 a number to
take words apart, half a one for each of zeros and scales.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launching import gdc_launch_dependents, gdc_wait, pdl_options
from .nibbles import base_of, minus, numbers, run_of_words, times
from .packed_weight import Packed
from .rehearsal import launch
from .skinny import SkinnyWorkspace, elements, finish_share

MANY = tl.constexpr(64)
"""From so many rows a program, scales are applied to numbers."""


@triton.jit
def of_groups(ptr, column, in_n, stride, WIDTH: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """→ what the groups of a word's 8 parts have at ptr, each [BLOCK_N]; column: of part 0."""
    return (
        tl.load(ptr + column // GROUP_SIZE * stride, mask=in_n, other=0.0),
        tl.load(ptr + (column + WIDTH) // GROUP_SIZE * stride, mask=in_n, other=0.0),
        tl.load(ptr + (column + 2 * WIDTH) // GROUP_SIZE * stride, mask=in_n, other=0.0),
        tl.load(ptr + (column + 3 * WIDTH) // GROUP_SIZE * stride, mask=in_n, other=0.0),
        tl.load(ptr + (column + 4 * WIDTH) // GROUP_SIZE * stride, mask=in_n, other=0.0),
        tl.load(ptr + (column + 5 * WIDTH) // GROUP_SIZE * stride, mask=in_n, other=0.0),
        tl.load(ptr + (column + 6 * WIDTH) // GROUP_SIZE * stride, mask=in_n, other=0.0),
        tl.load(ptr + (column + 7 * WIDTH) // GROUP_SIZE * stride, mask=in_n, other=0.0),
    )


@triton.jit
def _less_zero(value, zero_ptrs, in_n, ZERO: tl.constexpr):
    """[BLOCK_N, RUN] numbers from `numbers` → without what they have too much."""
    BASE: tl.constexpr = base_of(value.dtype)
    if ZERO:
        zero = tl.load(zero_ptrs, mask=in_n, other=0).to(tl.float32) + BASE
        less = zero.to(value.dtype)[:, None]
    else:
        less = tl.full([1, 1], BASE + 8, value.dtype)
    return minus(value, tl.broadcast_to(less, value.shape))


@triton.jit
def _add_part(acc, value, x, scale, SCALED_NUMBERS: tl.constexpr):
    """acc + value xᵀ * scale. value: [BLOCK_N, RUN], x: [BLOCK_M, RUN], scale: [BLOCK_N]"""
    if SCALED_NUMBERS:
        value = times(value, tl.broadcast_to(scale.to(x.dtype)[:, None], value.shape))
        acc = tl.dot(value, tl.trans(x), acc, input_precision="ieee")
    else:
        acc += tl.dot(value, tl.trans(x), input_precision="ieee") * scale.to(tl.float32)[:, None]
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _nibble_skinny_kernel(
    out_ptr,
    partial_ptr,
    counter_ptr,
    x_ptr,
    values_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    num_rows,
    stride_out,
    stride_x,
    stride_values,
    stride_scale,
    stride_zero,
    stride_residual,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ZERO: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program BLOCK_N outputs (and as many gates) of BLOCK_M rows, over 1 / SPLIT of words."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, RUN)
    in_n = output < N
    in_m = row < num_rows
    SHARE: tl.constexpr = ((WIDTH // RUN) + SPLIT - 1) // SPLIT * RUN
    begin = tl.program_id(2) * SHARE
    value_ptrs = values_ptr + output.to(tl.int64)[:, None] * stride_values + begin + j[None, :]
    above = tl.full([], N, tl.int64) * stride_values
    SCALED_NUMBERS: tl.constexpr = BLOCK_M >= MANY
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * stride_x + begin + j[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) if GATED else acc
    scale_ptrs = scale_ptr + output
    end = tl.minimum(SHARE, WIDTH - begin)
    if not SCALED_NUMBERS:
        # Asked for a turn ahead: they are too narrow for the compiler to do it.
        scales = of_groups(scale_ptrs, begin, in_n, stride_scale, WIDTH, GROUP_SIZE)
        if GATED:
            up_scales = of_groups(scale_ptrs + N, begin, in_n, stride_scale, WIDTH, GROUP_SIZE)
    for start in tl.range(0, end, RUN, num_stages=STAGES):
        words = tl.load(value_ptrs + start, mask=in_n[:, None], other=0)
        values = numbers(words, x_ptr.dtype.element_ty)
        if GATED:
            up_words = tl.load(value_ptrs + above + start, mask=in_n[:, None], other=0)
            up_values = numbers(up_words, x_ptr.dtype.element_ty)
        # Scales for numbers lie as those do, so they are read where they are needed.
        ahead = begin + (start if SCALED_NUMBERS else tl.minimum(start + RUN, end - RUN))
        read = of_groups(scale_ptrs, ahead, in_n, stride_scale, WIDTH, GROUP_SIZE)
        if SCALED_NUMBERS:
            scales = read
        if GATED:
            up_read = of_groups(scale_ptrs + N, ahead, in_n, stride_scale, WIDTH, GROUP_SIZE)
            if SCALED_NUMBERS:
                up_scales = up_read
        for part in tl.static_range(8):
            x = tl.load(x_ptrs + part * WIDTH + start, mask=in_m[:, None], other=0.0)
            group = (part * WIDTH + begin + start) // GROUP_SIZE
            zero_ptrs = scale_ptrs
            if ZERO:
                zero_ptrs = zero_ptr + group * stride_zero + output
            value = _less_zero(values[part], zero_ptrs, in_n, ZERO)
            acc = _add_part(acc, value, x, scales[part], SCALED_NUMBERS)
            if GATED:
                value = _less_zero(up_values[part], zero_ptrs + N, in_n, ZERO)
                up_acc = _add_part(up_acc, value, x, up_scales[part], SCALED_NUMBERS)
        if not SCALED_NUMBERS:
            scales = read
            if GATED:
                up_scales = up_read
    finish_share(
        acc,
        up_acc,
        out_ptr,
        partial_ptr,
        counter_ptr,
        bias_ptr,
        residual_ptr,
        num_rows,
        stride_out,
        stride_residual,
        output,
        row,
        N,
        SPLIT,
        GATED,
        BIAS,
        RESIDUAL,
        BLOCK_M,
        BLOCK_N,
    )


class NibbleSkinnyShape(NamedTuple):
    """How the work is cut."""

    block_m: int
    """Rows a program"""
    block_n: int
    """Outputs a program"""
    run: int
    """Words of a row at a time, at most"""
    split: int
    """Programs that share one block of outputs, at most"""
    num_warps: int
    num_stages: int
    """Tiles of words on their way at once"""


RULED_ROWS = 128
"""Up to so many rows `nibble_skinny_rule` speaks."""


def nibble_skinny_rule(num_rows: int, outputs: int) -> NibbleSkinnyShape | None:
    """For weights that were not measured; None: unpacking them costs less. From those of Qwen3-8B
    on an H200: some hundred programs, with the tile that was best for most of its four products.
    """
    if num_rows > RULED_ROWS:
        return None
    block_m = max(triton.next_power_of_2(num_rows), 8)
    split = next(n for n in (1, 2, 4) if n == 4 or triton.cdiv(outputs, 64) * n >= 180)
    return NibbleSkinnyShape(block_m, *_RULED[block_m][:2], split, *_RULED[block_m][2:])


_RULED = {
    8: (64, 64, 4, 3),
    16: (64, 64, 4, 3),
    32: (64, 32, 4, 4),
    64: (128, 32, 8, 3),
    128: (128, 32, 8, 2),
}
"""block_m → block_n, run, num_warps, num_stages"""


def nibble_skinny(
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    shape: NibbleSkinnyShape,
    workspace: SkinnyWorkspace | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: [num_rows, size], last stride 1; weight: of [rows, size] → [num_rows, rows], or gated
    [num_rows, rows / 2], of x's type.

    bias: [rows]; residual: as the result, not with `gated`; `out` may be the residual. Sums in
    float32, rounded once. `workspace`: needed where `shape.split` is above 1. Raises ValueError for
    weights that `run_of_words` has no run of.
    """
    num_rows = x.shape[0]
    rows, width = weight.values.shape
    rows = rows // 2 if gated else rows
    if residual is not None and gated:
        raise ValueError("a gated product takes no residual")
    run = run_of_words(weight, shape.run)
    if not run:
        raise ValueError(f"no runs of words in {width} a row, {weight.group_size} columns a group")
    split = min(shape.split, width // run)
    bands, blocks = triton.cdiv(rows, shape.block_n), triton.cdiv(num_rows, shape.block_m)
    if split > 1:
        needed = elements(num_rows, rows, split, gated)
        if workspace is None or workspace.floats.numel() < needed:
            raise ValueError(f"{split} shares need a workspace of {needed} floats")
        if bands * blocks > workspace.counters.numel():
            raise ValueError(f"{bands * blocks} blocks of outputs need as many counters")
    if out is None:
        out = torch.empty((num_rows, rows), dtype=x.dtype, device=x.device)
    options = pdl_options(x.device)
    launch(_nibble_skinny_kernel, (bands, blocks, split))(
        out,
        workspace.floats if workspace is not None else out,
        workspace.counters if workspace is not None else out,
        x,
        weight.values,
        weight.scale,
        weight.zero,
        bias,
        residual,
        num_rows,
        out.stride(0),
        x.stride(0),
        weight.values.stride(0),
        weight.scale.stride(0),
        0 if weight.zero is None else weight.zero.stride(0),
        0 if residual is None else residual.stride(0),
        N=rows,
        WIDTH=width,
        GROUP_SIZE=weight.group_size,
        ZERO=weight.zero is not None,
        SPLIT=split,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        RUN=run,
        STAGES=shape.num_stages,
        PDL=bool(options),
        num_warps=shape.num_warps,
        **options,
    )
    return out
