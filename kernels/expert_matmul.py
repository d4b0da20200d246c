"""Many tokens through a layer of experts: rows gathered by expert, multiplied, put where they go.

    out[s] = x[s // DIVIDE] W_eᵀ        or, gated,        silu(g) * u of that product

with an expert's bias on the product, and another activation, where a model has them.

s are the slots of expert_slots.py's lists. Which tiles there are is found on the device: a program
counts through the lists' lengths to the tile that is its own. So a hot expert gets as many programs
as it needs, where programs striding over a list would be busy with it last; and the few programs
beyond the last tile end at once. As in skinny.py the weight's rows take the matrix unit's long
side. A quantized one is dequantised on its way there: a group's scale is applied to its sums where
rows are few, and to the numbers where they are many, as in nibble_skinny.py. Where x is in 8 bits
as well, both go there as they are, and the sums get a scale for each row of both.

Memory: an expert's weight once for each BLOCK_M of its slots, x once a band of outputs; both from
the L2 cache where bands and tiles of an expert run side by side. Operations: 2 a slot and element
of its expert.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .expert_bank import Bank, bank_arguments, tile_of, values_of
from .gates import Clamp, gated_product
from .launching import gdc_launch_dependents, gdc_wait, pdl_options
from .nibble_skinny import of_groups
from .nibbles import base_of, minus, numbers, times
from .packed_weight import Packed, part_as_float, part_unit
from .rehearsal import launch

SMALLEST_TILE, SMALLEST_TILE_IN_8_BITS = 16, 32
"""Columns that the matrix unit takes at least."""
MANY = tl.constexpr(32)
"""From so many slots a program, a group's scales are applied to numbers. Of sums, those of gates
would need more registers than there are."""


@triton.jit
def _taken_apart(tile, dtype: tl.constexpr, NIBBLES: tl.constexpr):
    """A tile, or the 8 numbers of its words, each too large by base_of(dtype)."""
    if NIBBLES:
        return numbers(tile, dtype)
    else:
        return tile


@triton.jit
def _scales(
    ptrs,
    column,
    in_n,
    stride,
    WIDTH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """→ for each part of a tile, the scales of its group, [BLOCK_N]; column: of part 0."""
    if PARTS == 8:
        return of_groups(ptrs, column, in_n, stride, WIDTH, GROUP_SIZE)
    elif PARTS == 4:
        return (
            tl.load(ptrs + column // GROUP_SIZE * stride, mask=in_n, other=0.0),
            tl.load(ptrs + (column + WIDTH) // GROUP_SIZE * stride, mask=in_n, other=0.0),
            tl.load(ptrs + (column + 2 * WIDTH) // GROUP_SIZE * stride, mask=in_n, other=0.0),
            tl.load(ptrs + (column + 3 * WIDTH) // GROUP_SIZE * stride, mask=in_n, other=0.0),
        )
    else:
        tl.static_assert(PARTS == 1)
        return (tl.load(ptrs + column // GROUP_SIZE * stride, mask=in_n, other=0.0),)


@triton.jit
def _add_part(
    acc,
    tile,
    x,
    scales,
    scale_ptr,
    zero_ptr,
    row,
    in_n,
    group,
    stride_scale,
    stride_zero,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
    PACKED: tl.constexpr,
    GROUPED: tl.constexpr,
    ZERO: tl.constexpr,
    NIBBLES: tl.constexpr,
    MANY_ROWS: tl.constexpr,
):
    """acc + part PART of a tile times xᵀ. tile: [BLOCK_N, BLOCK_K] as `_taken_apart` made it; x:
    [BLOCK_M, BLOCK_K]; scales: from `_scales`, for few rows; row: [BLOCK_N], of the whole bank."""
    dtype: tl.constexpr = x.dtype
    if dtype.primitive_bitwidth == 8:
        return tl.dot(tile, tl.trans(x), acc, out_dtype=acc.dtype)
    elif not PACKED:
        return tl.dot(tile, tl.trans(x), acc, input_precision="ieee")
    else:
        zero = tl.full([1, 1], OFFSET, tl.float32)
        if ZERO:
            zero_ptrs = zero_ptr + group * stride_zero + row
            zero = tl.load(zero_ptrs, mask=in_n, other=0).to(tl.float32)[:, None]
        if NIBBLES:
            less = (zero + base_of(dtype)).to(dtype)
            value = minus(tile[PART], tl.broadcast_to(less, tile[PART].shape))
        elif PARTS > 1:
            # Of unit + number: take off the unit and the zero together.
            unit = part_unit(PART, BITS)
            value = part_as_float(tile, PART, BITS) * unit - (unit + zero)
        elif ZERO:
            value = tile.to(tl.float32) - zero
        else:
            value = tile
        if GROUPED and MANY_ROWS:
            scale_ptrs = scale_ptr + group * stride_scale + row // SCALE_ROWS
            scale = tl.load(scale_ptrs, mask=in_n, other=0.0)[:, None]
            if NIBBLES:
                value = times(value, tl.broadcast_to(scale.to(dtype), value.shape))
            else:
                value = (value.to(tl.float32) * scale.to(tl.float32)).to(dtype)
            return tl.dot(value, tl.trans(x), acc, input_precision="ieee")
        elif GROUPED:
            product = tl.dot(value.to(dtype), tl.trans(x), input_precision="ieee")
            return acc + product * scales[PART].to(tl.float32)[:, None]
        else:
            return tl.dot(value.to(dtype), tl.trans(x), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens"])
def _expert_matmul_kernel(
    out_ptr,
    x_ptr,
    x_scale_ptr,
    lists_ptr,
    counts_ptr,
    values_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    num_tokens,
    stride_x,
    stride_values,
    stride_scale,
    stride_zero,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
    PACKED: tl.constexpr,
    GROUPED: tl.constexpr,
    ZERO: tl.constexpr,
    DIVIDE: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program BLOCK_N outputs (and as many gates) of BLOCK_M slots of an expert."""
    BANDS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    band = tl.program_id(0) % BANDS
    tile_number = tl.program_id(0) // BANDS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    every = tl.arange(0, BLOCK_E)
    lengths = tl.load(counts_ptr + every, mask=every < E, other=0)
    tiles = (lengths + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((ends <= tile_number).to(tl.int32), axis=0)
    if expert >= E:
        return
    mine = every == expert
    count = tl.sum(tl.where(mine, lengths, 0), axis=0)
    first = tile_number - tl.sum(tl.where(mine, ends - tiles, 0), axis=0)
    place = first * BLOCK_M + tl.arange(0, BLOCK_M)
    in_m = place < count
    list_ptr = lists_ptr + expert.to(tl.int64) * num_tokens
    slot = tl.load(list_ptr + place, mask=in_m, other=0)

    output = band * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_n = output < N
    ROWS: tl.constexpr = N * 2 if GATED else N
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = WIDTH % BLOCK_K == 0
    MANY_ROWS: tl.constexpr = BLOCK_M >= MANY
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    NIBBLES: tl.constexpr = PARTS == 8 and dtype != tl.float32
    above = expert.to(tl.int64) * ROWS
    value_ptrs = values_ptr + above * stride_values
    value_ptrs = value_ptrs + output[:, None] * stride_values + k[None, :]
    x_ptrs = x_ptr + (slot // DIVIDE).to(tl.int64)[:, None] * stride_x + k[None, :]
    row = above + output
    sums: tl.constexpr = tl.int32 if dtype == tl.int8 else tl.float32
    acc = tl.zeros([BLOCK_N, BLOCK_M], sums)
    up_acc = tl.zeros([BLOCK_N, BLOCK_M], sums) if GATED else acc
    SCALES: tl.constexpr = GROUPED and not MANY_ROWS
    scales = (in_n,)
    up_scales = scales
    scale_ptrs = scale_ptr
    up_scale_ptrs = scale_ptr
    if SCALES:
        # Asked for a turn ahead: they are too narrow for the compiler to do it.
        scale_ptrs = scale_ptr + row // SCALE_ROWS
        scales = _scales(scale_ptrs, 0, in_n, stride_scale, WIDTH, GROUP_SIZE, PARTS)
        if GATED:
            up_scale_ptrs = scale_ptr + (row + N) // SCALE_ROWS
            up_scales = _scales(up_scale_ptrs, 0, in_n, stride_scale, WIDTH, GROUP_SIZE, PARTS)
    for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
        if SCALES:
            ahead = tl.minimum(start + BLOCK_K, WIDTH - BLOCK_K)
            read = _scales(scale_ptrs, ahead, in_n, stride_scale, WIDTH, GROUP_SIZE, PARTS)
            if GATED:
                up_read = _scales(
                    up_scale_ptrs, ahead, in_n, stride_scale, WIDTH, GROUP_SIZE, PARTS
                )
        in_k = start + k < WIDTH
        if EVEN_N and EVEN_K:
            tile = tl.load(value_ptrs + start)
        elif EVEN_K:
            tile = tl.load(value_ptrs + start, mask=in_n[:, None], other=0.0)
        else:
            tile = tl.load(value_ptrs + start, mask=in_n[:, None] & in_k[None, :], other=0.0)
        tile = _taken_apart(tile, dtype, NIBBLES)
        if GATED:
            up_ptrs = value_ptrs + N * stride_values + start
            if EVEN_N and EVEN_K:
                up_tile = tl.load(up_ptrs)
            elif EVEN_K:
                up_tile = tl.load(up_ptrs, mask=in_n[:, None], other=0.0)
            else:
                up_tile = tl.load(up_ptrs, mask=in_n[:, None] & in_k[None, :], other=0.0)
            up_tile = _taken_apart(up_tile, dtype, NIBBLES)
        for part in tl.static_range(PARTS):
            if EVEN_K:
                x = tl.load(x_ptrs + part * WIDTH + start, mask=in_m[:, None], other=0.0)
            else:
                mask = in_m[:, None] & in_k[None, :]
                x = tl.load(x_ptrs + part * WIDTH + start, mask=mask, other=0.0)
            group = (part * WIDTH + start) // GROUP_SIZE
            acc = _add_part(
                acc, tile, x, scales, scale_ptr, zero_ptr, row, in_n, group, stride_scale,
                stride_zero, part, PARTS, BITS, SCALE_ROWS, OFFSET, PACKED, GROUPED, ZERO, NIBBLES,
                MANY_ROWS,
            )  # fmt: skip
            if GATED:
                up_acc = _add_part(
                    up_acc, up_tile, x, up_scales, scale_ptr, zero_ptr, row + N, in_n, group,
                    stride_scale, stride_zero, part, PARTS, BITS, SCALE_ROWS, OFFSET, PACKED,
                    GROUPED, ZERO, NIBBLES, MANY_ROWS,
                )  # fmt: skip
        if SCALES:
            scales = read
            if GATED:
                up_scales = up_read
    if PACKED and not GROUPED:
        scale = tl.load(scale_ptr + row // SCALE_ROWS, mask=in_n, other=0.0).to(tl.float32)
        acc = acc.to(tl.float32) * scale[:, None]
        if GATED:
            scale = tl.load(scale_ptr + (row + N) // SCALE_ROWS, mask=in_n, other=0.0)
            up_acc = up_acc.to(tl.float32) * scale.to(tl.float32)[:, None]
    # Read once more, by what the compiler takes for another load: kept from above, in the layout of
    # results, they would fill the registers that sums need.
    slot = tl.load(list_ptr + place, mask=in_m, other=0, cache_modifier=".ca")
    if dtype.primitive_bitwidth == 8:
        x_scale = tl.load(x_scale_ptr + slot // DIVIDE, mask=in_m, other=0.0)[None, :]
        acc *= x_scale
        if GATED:
            up_acc *= x_scale
    if BIAS:
        acc += tl.load(bias_ptr + row, mask=in_n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_acc += tl.load(bias_ptr + row + N, mask=in_n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = gated_product(acc, up_acc, ALPHA, LIMIT)
    target = out_ptr + slot.to(tl.int64)[None, :] * N + output[:, None]
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=in_n[:, None] & in_m[None, :])


class ExpertMatmulShape(NamedTuple):
    """How the work is cut."""

    block_m: int
    """Slots of an expert a program"""
    block_n: int
    """Outputs a program"""
    block_k: int
    """Elements of a row (numbers, or words) at a time, at most"""
    num_warps: int
    num_stages: int


def expert_matmul_shape(
    num_slots: int, num_experts: int, bank: Bank, gated: bool, *, in_8_bits: bool = False
) -> ExpertMatmulShape:
    """From what was measured on an H200 at Qwen3-30B-A3B's sizes, dense, in fp8 and in 4 bits.

    A tile holds an expert's usual number of slots, up to 128; rows of weights a program, gates
    counted, are about as many with gates as without.
    """
    usual = num_slots / num_experts
    block_m = 16 if usual <= 8 else 32 if usual <= 16 else 64 if usual <= 48 else 128
    values = values_of(bank)
    if values.dtype == torch.float32:
        rows, block_k, num_warps, num_stages = 64, 32, 4, 2
        block_m = min(block_m, 64)
    elif values.dtype == torch.int32:
        # Gates go with small tiles, as both products' sums and numbers share the registers.
        block_m = block_m if gated else min(block_m, 64)
        rows, block_k, num_warps, num_stages = {
            16: (128, 32, 4, 3),
            32: (128 if gated else 64, 32, 4, 2),
            64: (256, 32, 8, 3) if gated else (256, 32, 4, 2),
            128: (256, 32, 8, 2),
        }[block_m]
    elif in_8_bits:
        rows, block_k, num_warps, num_stages = 128, 128, 4, 3
        if block_m <= 32 and not gated:
            rows = 64
    elif values.element_size() == 1:
        rows, block_k, num_warps, num_stages = {
            16: (128 if gated else 64, 128, 4, 3),
            32: (128 if gated else 64, 64, 4, 3),
            64: (128, 64, 4, 3),
            # Eight warps read wrong scales of groups, now and then (Triton 3.6).
            128: (128, 64, 4, 3),
        }[block_m]
    else:
        rows, block_k, num_warps, num_stages = {
            16: (128, 128, 4, 3),
            32: (128, 64, 4, 5),
            64: (128, 64, 4, 4),
            128: (256, 64, 8, 4),
        }[block_m]
    return ExpertMatmulShape(block_m, rows // (2 if gated else 1), block_k, num_warps, num_stages)


def most_tiles(num_slots: int, num_experts: int, block_m: int) -> int:
    """Tiles of block_m slots that lists of experts can need, whatever is chosen."""
    chosen = min(num_slots, num_experts)
    return chosen + (num_slots - chosen) // block_m


def expert_matmul(
    x: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    bank: Bank,
    *,
    top_k: int,
    gated: bool,
    x_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    clamp: Clamp | None = None,
    dtype: torch.dtype | None = None,
    shape: ExpertMatmulShape | None = None,
) -> torch.Tensor:
    """x: [num_tokens, size], or a row for each slot, [num_tokens * top_k, size] → [num_tokens *
    top_k, rows], or gated [num_tokens * top_k, rows / 2], of `dtype` (None: x's).

    slots: [num_experts, num_tokens] and counts: [num_experts], from `expert_slots`; rows: those of
    an expert; last strides 1. x may be of the bank's 8-bit type, with a float32 `x_scale` for each
    of its rows, where the bank has one for each of its own. bias: [num_experts * rows], contiguous;
    `clamp`: in place of silu(g) * u. Sums in float32 (of int8: int32), rounded once. Raises
    ValueError where the bank's groups are too narrow for the matrix unit (`expert_matmul_serves`).
    """
    num_experts, num_tokens = slots.shape
    num_slots = num_tokens * top_k
    rows = values_of(bank).shape[0] // num_experts
    outputs = rows // 2 if gated else rows
    out = torch.empty((num_slots, outputs), dtype=dtype or x.dtype, device=x.device)
    if num_slots == 0:
        return out
    in_8_bits = x_scale is not None
    shape = shape or expert_matmul_shape(num_slots, num_experts, bank, gated, in_8_bits=in_8_bits)
    block_k = tile_of(bank, shape.block_k)
    if not (isinstance(bank, Packed) and bank.grouped):
        block_k = max(block_k, SMALLEST_TILE_IN_8_BITS if in_8_bits else SMALLEST_TILE)
    elif block_k < SMALLEST_TILE:
        raise ValueError(f"groups of {bank.group_size} leave tiles of {block_k} columns")
    arguments = bank_arguments(bank)
    bands = triton.cdiv(outputs, shape.block_n)
    tiles = most_tiles(num_slots, num_experts, shape.block_m)
    options = pdl_options(x.device)
    launch(_expert_matmul_kernel, (bands * tiles,))(
        out,
        x,
        x_scale,
        slots,
        counts,
        *arguments.tensors,
        bias,
        num_tokens,
        x.stride(0),
        *arguments.strides,
        E=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts),
        N=outputs,
        **arguments.constants,
        DIVIDE=num_slots // x.shape[0],
        GATED=gated,
        BIAS=bias is not None,
        ALPHA=clamp.alpha if clamp else None,
        LIMIT=clamp.limit if clamp else None,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=block_k,
        STAGES=shape.num_stages,
        PDL=bool(options),
        num_warps=shape.num_warps,
        **options,
    )
    return out


def expert_matmul_serves(bank: Bank) -> bool:
    """Whether the bank's groups are wide enough."""
    return not isinstance(bank, Packed) or not bank.grouped or tile_of(bank, 16) >= SMALLEST_TILE
