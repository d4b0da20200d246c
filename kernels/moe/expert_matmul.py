"""Many tokens through a layer of experts: rows gathered by expert, multiplied, stored by slot.

    out[s] = x[s // DIVIDE] W_eᵀ        or, gated,        silu(g) * u of that product

with an expert's bias on the product, and another activation.

s are the slots of sort_tokens.py's lists. A program finds its tile on the device from the lists'
lengths, so a frequent expert gets as many programs as it needs. As in small_m_matmul.py the
weight's rows take the tensor core's long side, and a quantized weight is dequantised before it: a
group's scale is applied to its sums if rows are few, and to the numbers if they are many. If x is
in 8 bits as well, the tensor core multiplies both directly, and the sums are scaled by a scale per
row of both.

Memory: an expert's weight once per BLOCK_M of its slots, x once per BLOCK_N outputs; both from
the L2 cache where programs of an expert run side by side. Operations: 2 per slot and element of its
expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..activations import GatedActivation, gate_constants, squared_relu
from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from ..quant.dequant_tile import dot_part, load_part_scales, part_column, unpack_tile
from ..quant.quantized_weight import (
    Weight,
    even_tile,
    values_of,
    weight_arguments,
)
from ..tiles import apply_bias_and_gate, load_tile

SMALLEST_TILE, SMALLEST_TILE_IN_8_BITS = 16, 32
MANY_ROWS = tl.constexpr(32)
"""Slots per program from which on a group's scales are applied to numbers. Gated sums would need
too many registers."""


@triton.jit(do_not_specialize=["num_tokens"])
def _expert_matmul_kernel(
    out_ptr,
    x_ptr,
    x_scale_ptr,
    lists_ptr,
    counts_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    num_tokens,
    stride_x,
    stride_weight,
    stride_scale,
    stride_zero,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    DIVIDE: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SQUARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    WIDTH: tl.constexpr = FORMAT.width
    PACK_FACTOR: tl.constexpr = FORMAT.pack_factor
    if FORMAT.run is not None:
        stride_weight = WIDTH  # No gaps: of a constant the compiler knows the alignment.
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile_n = tl.program_id(0) % TILES_N
    tile_m = tl.program_id(0) // TILES_N
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Find the expert of tile tile_m (tiles of all experts are numbered in order), and its slots.
    offs_e = tl.arange(0, BLOCK_E)
    lengths = tl.load(counts_ptr + offs_e, mask=offs_e < E, other=0)
    tiles = (lengths + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((ends <= tile_m).to(tl.int32), axis=0)
    if expert >= E:
        return
    selected = offs_e == expert
    count = tl.sum(tl.where(selected, lengths, 0), axis=0)
    first = tile_m - tl.sum(tl.where(selected, ends - tiles, 0), axis=0)
    offs_m = first * BLOCK_M + tl.arange(0, BLOCK_M)
    in_m = offs_m < count
    list_ptr = lists_ptr + expert.to(tl.int64) * num_tokens
    slot = tl.load(list_ptr + offs_m, mask=in_m, other=0)

    offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    in_n = offs_n < N
    ROWS: tl.constexpr = N * 2 if GATED else N
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = WIDTH % BLOCK_K == 0
    SCALE_NUMBERS: tl.constexpr = BLOCK_M >= MANY_ROWS
    SCALE_SUMS: tl.constexpr = FORMAT.grouped and BLOCK_M < MANY_ROWS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first_row = expert.to(tl.int64) * ROWS
    weight_ptrs = weight_ptr + first_row * stride_weight
    weight_ptrs = weight_ptrs + offs_n[:, None] * stride_weight + offs_k[None, :]
    x_ptrs = x_ptr + (slot // DIVIDE).to(tl.int64)[:, None] * stride_x + offs_k[None, :]
    rows = first_row + offs_n
    sum_dtype: tl.constexpr = tl.int32 if dtype == tl.int8 else tl.float32
    acc = tl.zeros([BLOCK_N, BLOCK_M], sum_dtype)
    up_acc = tl.zeros([BLOCK_N, BLOCK_M], sum_dtype) if GATED else acc
    scales = (in_n,)
    up_scales = scales
    scale_ptrs = scale_ptr
    up_scale_ptrs = scale_ptr
    if SCALE_SUMS:
        # Loaded one iteration ahead: they are too narrow for the compiler to pipeline.
        scale_ptrs = scale_ptr + rows // FORMAT.scale_rows
        scales = load_part_scales(scale_ptrs, 0, in_n, stride_scale, FORMAT)
        if GATED:
            up_scale_ptrs = scale_ptr + (rows + N) // FORMAT.scale_rows
            up_scales = load_part_scales(up_scale_ptrs, 0, in_n, stride_scale, FORMAT)
    for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
        if SCALE_SUMS:
            ahead = tl.minimum(start + BLOCK_K, (WIDTH - 1) // BLOCK_K * BLOCK_K)
            next_scales = load_part_scales(scale_ptrs, ahead, in_n, stride_scale, FORMAT)
            if GATED:
                next_up_scales = load_part_scales(up_scale_ptrs, ahead, in_n, stride_scale, FORMAT)
        in_k = start + offs_k < WIDTH
        tile = load_tile(weight_ptrs + start, in_n, in_k, EVEN_N, EVEN_K, "")
        tile = unpack_tile(tile, dtype, FORMAT)
        if GATED:
            up_ptrs = weight_ptrs + N * stride_weight + start
            up_tile = load_tile(up_ptrs, in_n, in_k, EVEN_N, EVEN_K, "")
            up_tile = unpack_tile(up_tile, dtype, FORMAT)
        for part in tl.static_range(PACK_FACTOR):
            k = part_column(start, part, FORMAT)
            part_ptrs = x_ptrs + k
            if FORMAT.run is None:
                part_ptrs = x_ptrs + part * WIDTH + start  # The first sum stays out of the loop.
            x = load_tile(part_ptrs, in_m, in_k, False, EVEN_K, "")
            group = k // FORMAT.group_size
            acc = dot_part(
                acc, tile, x, scales, scale_ptr, zero_ptr, rows, in_n, group, stride_scale,
                stride_zero, part, FORMAT, SCALE_NUMBERS, True,
            )  # fmt: skip
            if GATED:
                up_acc = dot_part(
                    up_acc, up_tile, x, up_scales, scale_ptr, zero_ptr, rows + N, in_n, group,
                    stride_scale, stride_zero, part, FORMAT, SCALE_NUMBERS, True,
                )  # fmt: skip
        if SCALE_SUMS:
            scales = next_scales
            if GATED:
                up_scales = next_up_scales
    if FORMAT.quantized and not FORMAT.grouped:
        scale = tl.load(scale_ptr + rows // FORMAT.scale_rows, mask=in_n, other=0.0)
        acc = acc.to(tl.float32) * scale.to(tl.float32)[:, None]
        if GATED:
            scale = tl.load(scale_ptr + (rows + N) // FORMAT.scale_rows, mask=in_n, other=0.0)
            up_acc = up_acc.to(tl.float32) * scale.to(tl.float32)[:, None]
    # Loaded again, with another cache modifier so that the compiler does not merge the loads: kept
    # from above, in the layout of the results, they would take the registers that sums need.
    slot = tl.load(list_ptr + offs_m, mask=in_m, other=0, cache_modifier=".ca")
    if dtype.primitive_bitwidth == 8:
        x_scale = tl.load(x_scale_ptr + slot // DIVIDE, mask=in_m, other=0.0)[None, :]
        acc *= x_scale
        if GATED:
            up_acc *= x_scale
    acc = apply_bias_and_gate(acc, up_acc, bias_ptr, rows, in_n, N, GATED, BIAS, ALPHA, LIMIT)
    if SQUARED:
        acc = squared_relu(acc)
    out_ptrs = out_ptr + slot.to(tl.int64)[None, :] * N + offs_n[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_n[:, None] & in_m[None, :])


class ExpertMatmulConfig(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def expert_matmul_config(
    num_slots: int, num_experts: int, weight: Weight, gated: bool, *, in_8_bits: bool = False
) -> ExpertMatmulConfig:
    """Return the tiles, from measurements on an H200 at Qwen3-30B-A3B's sizes in bfloat16, fp8 and
    4 bits.

    A tile holds an expert's usual number of slots, up to 128; rows of weights per program, gates
    included, are about as many with gates as without.
    """
    usual = num_slots / num_experts
    block_m = 16 if usual <= 8 else 32 if usual <= 16 else 64 if usual <= 48 else 128
    values = values_of(weight)
    if values.dtype == torch.float32:
        rows, block_k, num_warps, num_stages = 64, 32, 4, 2
        block_m = min(block_m, 64)
    elif values.dtype == torch.int32:
        # Gates go with small tiles, as both products' sums and numbers share the registers.
        block_m = block_m if gated else min(block_m, 64)
        floats = not isinstance(weight, torch.Tensor) and weight.e2m1_run is not None
        rows, block_k, num_warps, num_stages = {
            16: (128, 32, 4, 3),
            32: (128 if gated else 64, 32, 4, 2),
            # Floats, which are not measured yet, would not fit the registers of four warps.
            64: (256, 32, 8, 3) if gated or floats else (256, 32, 4, 2),
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
            # Not eight warps: Triton 3.6 overwrites registers that the tensor core still reads
            # (docs/benchmarks/journal.md, tests/kernels/test_expert_repeats.py).
            128: (128, 64, 4, 3),
        }[block_m]
    else:
        rows, block_k, num_warps, num_stages = {
            16: (128, 128, 4, 3),
            32: (128, 64, 4, 5),
            64: (128, 64, 4, 4),
            128: (256, 64, 8, 4),
        }[block_m]
    return ExpertMatmulConfig(block_m, rows // (2 if gated else 1), block_k, num_warps, num_stages)


def most_tiles(num_slots: int, num_experts: int, block_m: int) -> int:
    """Return the most tiles of block_m slots that lists of experts can need, for any routing."""
    num_used = min(num_slots, num_experts)
    return num_used + (num_slots - num_used) // block_m


def expert_matmul(
    x: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    weight: Weight,
    *,
    top_k: int,
    gated: bool,
    x_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: GatedActivation | None = None,
    squared: bool = False,
    dtype: torch.dtype | None = None,
    config: ExpertMatmulConfig | None = None,
) -> torch.Tensor:
    """x: [num_tokens, K], or a row for each slot, [num_tokens * top_k, K]; weight: [num_experts *
    N, K] → [num_tokens * top_k, N], or gated [num_tokens * top_k, N / 2], of `dtype` (None: x's).

    slots: [num_experts, num_tokens] and counts: [num_experts], from `sort_tokens`; last strides 1.
    x may be of the weight's 8-bit type, with a float32 `x_scale` for each of its rows, if the
    weight has one for each of its own. bias: [num_experts * N], contiguous; `activation`: in place
    of silu(g) * u; `squared`: relu(out)², not gated. Sums in float32 (of int8: int32), rounded
    once. Raises ValueError if the weight's groups are too narrow for the tensor core
    (`expert_matmul_supports`).
    """
    num_experts, num_tokens = slots.shape
    num_slots = num_tokens * top_k
    rows = values_of(weight).shape[0] // num_experts
    outputs = rows // 2 if gated else rows
    out = torch.empty((num_slots, outputs), dtype=dtype or x.dtype, device=x.device)
    if num_slots == 0:
        return out
    in_8_bits = x_scale is not None
    config = config or expert_matmul_config(
        num_slots, num_experts, weight, gated, in_8_bits=in_8_bits
    )
    block_k = even_tile(weight, config.block_k)
    if isinstance(weight, torch.Tensor) or not weight.grouped:
        block_k = max(block_k, SMALLEST_TILE_IN_8_BITS if in_8_bits else SMALLEST_TILE)
    elif block_k < SMALLEST_TILE:
        raise ValueError(f"groups of {weight.group_size} leave tiles of {block_k} columns")
    arguments = weight_arguments(weight)
    tiles = most_tiles(num_slots, num_experts, config.block_m)
    options = pdl_options(x.device)
    launch(_expert_matmul_kernel, (triton.cdiv(outputs, config.block_n) * tiles,))(
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
        FORMAT=arguments.format,
        DIVIDE=num_slots // x.shape[0],
        GATED=gated,
        BIAS=bias is not None,
        **gate_constants(activation),
        SQUARED=squared,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        STAGES=config.num_stages,
        PDL=bool(options),
        num_warps=config.num_warps,
        **options,
    )
    return out


def expert_matmul_supports(weight: Weight) -> bool:
    if isinstance(weight, torch.Tensor) or not weight.grouped:
        return True
    return even_tile(weight, SMALLEST_TILE) >= SMALLEST_TILE
