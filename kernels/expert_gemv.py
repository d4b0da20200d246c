"""Few tokens through layers of experts, slot by slot: bound by reading the experts' weights.

    out[s] = silu(g) * u of x[s // top_k] W_eᵀ     or     out[t] = residual[t] + Σ_s c_s x[s] W_eᵀ

with an expert's bias on either product, and another activation, where a model has them.

A slot is a token's choice of an expert e = experts[s]; in the second form, s are a token's slots
and c their weights: gemv.py's pass over rows of several weights, one after the other. So two
launches make a layer and nothing needs sorting. Memory: an expert's weight once a slot (programs
that read the same run side by side and share it in the L2 cache); x once a program.

With programmatic dependent launch the second product's weights are asked for while the first one
still reads its own: who was chosen has been known since before that one began.
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
from .packed_weight import part_as_float, part_unit
from .rehearsal import launch
from .skinny import ask_for

AHEAD_BYTES = 32 << 20
"""Weights that are asked for before their kernel's turn, at most: half of an H200's L2 cache."""


@triton.jit
def _factor_and_offset(
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
    ZERO: tl.constexpr,
):
    """→ a and b, [BLOCK_N] float32: a weight is a * raw - b, raw as `_raw` has it."""
    scale_ptrs = scale_ptr + group * stride_scale + row // SCALE_ROWS
    scale = tl.load(scale_ptrs, mask=in_n, other=0.0).to(tl.float32)
    offset = tl.full(scale.shape, OFFSET, tl.float32)
    if ZERO:
        zero_ptrs = zero_ptr + group * stride_zero + row
        offset = tl.load(zero_ptrs, mask=in_n, other=0).to(tl.float32)
    if PARTS == 1:
        return scale, offset * scale
    else:
        unit = part_unit(PART, BITS)
        return scale * unit, (offset + unit) * scale


@triton.jit
def _raw(tile, PART: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr):
    """Elements of a tile, or part PART of its words as 1 + number / unit; float32."""
    if PARTS == 1:
        return tile.to(tl.float32)
    else:
        return part_as_float(tile, PART, BITS)


@triton.jit
def _expert_gemv_kernel(
    out_ptr,
    x_ptr,
    experts_ptr,
    factor_ptr,
    residual_ptr,
    values_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    stride_out,
    stride_x,
    stride_residual,
    stride_values,
    stride_scale,
    stride_zero,
    E: tl.constexpr,
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
    COUNT: tl.constexpr,
    DIVIDE: tl.constexpr,
    GATED: tl.constexpr,
    FACTOR: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    PREFETCH: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program BLOCK_N outputs (and as many gates), and COUNT slots that are summed: a row of
    weights for each of both."""
    target = tl.program_id(0)
    band = tl.program_id(1)
    r = tl.arange(0, BLOCK_COUNT * BLOCK_N)
    row = band * BLOCK_N + r % BLOCK_N
    in_r = (row < N) & (r // BLOCK_N < COUNT)
    slot = target * COUNT + tl.minimum(r // BLOCK_N, COUNT - 1)
    k = tl.arange(0, BLOCK_K)
    ROWS: tl.constexpr = N * 2 if GATED else N
    EVEN_K: tl.constexpr = WIDTH % BLOCK_K == 0
    EVEN: tl.constexpr = EVEN_K and N % BLOCK_N == 0 and COUNT == BLOCK_COUNT
    if PREFETCH is not None:
        # A thread a piece. Were ids not there yet, it would ask for others, in vain; nothing else,
        # as what is read here stays out of the cache that they are read from below.
        piece = tl.arange(0, BLOCK_COUNT * BLOCK_N * PIECES)
        place = tl.minimum(piece // (BLOCK_N * PIECES), COUNT - 1)
        wanted = tl.load(experts_ptr + target * COUNT + place, cache_modifier=".cg")
        wanted = tl.minimum(tl.maximum(wanted, 0), E - 1).to(tl.int64) * ROWS
        wanted += band * BLOCK_N + piece // PIECES % BLOCK_N
        ask_for(values_ptr + wanted * stride_values + piece % PIECES * (WIDTH // PIECES), PREFETCH)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Whatever the router wrote, what is read is the bank's.
    expert = tl.minimum(tl.maximum(tl.load(experts_ptr + slot), 0), E - 1)
    above = expert.to(tl.int64) * ROWS + row
    ptrs = values_ptr + above[:, None] * stride_values + k[None, :]
    if COUNT == 1:
        x_ptrs = x_ptr + (target // DIVIDE).to(tl.int64) * stride_x + k[None, :]
    else:
        x_ptrs = x_ptr + (slot // DIVIDE).to(tl.int64)[:, None] * stride_x + k[None, :]
    acc = tl.zeros([BLOCK_COUNT * BLOCK_N, BLOCK_K], tl.float32)
    up_acc = tl.zeros([BLOCK_COUNT * BLOCK_N, BLOCK_K], tl.float32) if GATED else acc
    for base in range(0, WIDTH, BLOCK_K * UNROLL):
        for more in tl.static_range(UNROLL):
            start = base + more * BLOCK_K
            in_k = (start + k < WIDTH)[None, :]
            mask = in_r[:, None] & in_k
            if EVEN:
                tile = tl.load(ptrs + start, eviction_policy="evict_first")
            else:
                tile = tl.load(ptrs + start, mask=mask, other=0.0, eviction_policy="evict_first")
            up_tile = tile
            if GATED:
                up_ptrs = ptrs + N * stride_values + start
                if EVEN:
                    up_tile = tl.load(up_ptrs, eviction_policy="evict_first")
                else:
                    up_tile = tl.load(up_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
            for part in tl.static_range(PARTS):
                if EVEN_K:
                    x = tl.load(x_ptrs + part * WIDTH + start).to(tl.float32)
                else:
                    x = tl.load(x_ptrs + part * WIDTH + start, mask=in_k, other=0.0)
                    x = x.to(tl.float32)
                value = _raw(tile, part, PARTS, BITS)
                if PACKED:
                    group = (part * WIDTH + start) // GROUP_SIZE
                    scale, offset = _factor_and_offset(
                        scale_ptr, zero_ptr, above, in_r, group, stride_scale, stride_zero,
                        part, PARTS, BITS, SCALE_ROWS, OFFSET, ZERO,
                    )  # fmt: skip
                    value = value * scale[:, None] - offset[:, None]
                acc += value * x
                if GATED:
                    value = _raw(up_tile, part, PARTS, BITS)
                    if PACKED:
                        scale, offset = _factor_and_offset(
                            scale_ptr, zero_ptr, above + N, in_r, group, stride_scale,
                            stride_zero, part, PARTS, BITS, SCALE_ROWS, OFFSET, ZERO,
                        )  # fmt: skip
                        value = value * scale[:, None] - offset[:, None]
                    up_acc += value * x
    sums = tl.sum(acc, axis=1)
    if BIAS:
        sums += tl.load(bias_ptr + above, mask=in_r, other=0.0).to(tl.float32)
    if GATED:
        up_sums = tl.sum(up_acc, axis=1)
        if BIAS:
            up_sums += tl.load(bias_ptr + above + N, mask=in_r, other=0.0).to(tl.float32)
        sums = gated_product(sums, up_sums, ALPHA, LIMIT)
    if FACTOR:
        sums *= tl.load(factor_ptr + slot, mask=in_r, other=0.0)
    out = tl.sum(tl.reshape(sums, [BLOCK_COUNT, BLOCK_N]), axis=0)
    output = band * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = output < N
    if RESIDUAL:
        residual = residual_ptr + target.to(tl.int64) * stride_residual + output
        out += tl.load(residual, mask=in_n, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + target.to(tl.int64) * stride_out + output
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_n)


class ExpertGemvShape(NamedTuple):
    """How the work is cut."""

    block_n: int
    """Outputs a program"""
    block_k: int
    """Elements of a row (numbers, or words) at a time"""
    unroll: int
    """Tiles that are asked for at once, at most"""
    num_warps: int


def expert_gemv_shape(bank: Bank, count: int) -> ExpertGemvShape:
    """From what was measured on an H200 at Qwen3-30B-A3B's sizes, dense, in fp8 and in 4 bits.

    `count`: slots that are summed. One: rows as wide as they come, so that a token has a thousand
    programs. Several: a program has a few rows of each. Bytes in groups narrower than those that
    were measured (mxfp4's): as many rows as give each thread 16 bytes of a tile.
    """
    values = values_of(bank)
    item = values.element_size()
    words = values.dtype == torch.int32
    if item == 1 and (narrow := tile_of(bank, 64)) < 64:
        block_n = max(512 // narrow // triton.next_power_of_2(count), 1)
        return ExpertGemvShape(block_n, narrow, unroll=2, num_warps=1)
    if count == 1 and words:
        return ExpertGemvShape(block_n=4, block_k=tile_of(bank, 128), unroll=1, num_warps=1)
    if count == 1:
        block_k = tile_of(bank, 512 if item == 4 else 1024)
        if item == 1:
            return ExpertGemvShape(2, block_k, unroll=2, num_warps=1)
        num_warps = min(max(block_k * item // 512, 1), 4)
        block_n = 2 if num_warps > 1 else min(max(1024 // (block_k * item), 2), 8)
        return ExpertGemvShape(block_n, block_k, unroll=1, num_warps=num_warps)
    rows = 32 if words else 8
    block_n = max(rows // triton.next_power_of_2(count), 1)
    if words:
        return ExpertGemvShape(block_n, tile_of(bank, 32), unroll=1, num_warps=4)
    return ExpertGemvShape(block_n, tile_of(bank, 256), unroll=4 if item == 1 else 1, num_warps=2)


def expert_gemv(
    x: torch.Tensor,
    experts: torch.Tensor,
    bank: Bank,
    num_experts: int,
    *,
    factor: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    clamp: Clamp | None = None,
    shape: ExpertGemvShape | None = None,
    known: bool = False,
) -> torch.Tensor:
    """Without `factor`, gate and up of each slot: x [num_tokens, size] → [num_tokens * top_k, rows
    / 2] of x's type. With it, down and the sum: x [num_tokens * top_k, size] and factor
    [num_tokens, top_k] float32 → residual + sum, [num_tokens, rows].

    experts: [num_tokens, top_k] int32, contiguous; rows: those of an expert; last strides 1; `out`
    may be the residual; bias: [num_experts * rows], contiguous; `clamp`: in place of silu(g) * u.
    `known`: experts were written before the last kernel on the stream began.
    """
    num_tokens, top_k = experts.shape
    gated = factor is None
    rows = values_of(bank).shape[0] // num_experts
    outputs = rows // 2 if gated else rows
    count, targets = (1, num_tokens * top_k) if gated else (top_k, num_tokens)
    if out is None:
        out = torch.empty((targets, outputs), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    shape = shape or expert_gemv_shape(bank, count)
    arguments = bank_arguments(bank)
    tiles = triton.cdiv(arguments.constants["WIDTH"], shape.block_k)
    unroll = max(n for n in range(1, shape.unroll + 1) if tiles % n == 0)
    options = pdl_options(x.device)
    item, width = values_of(bank).element_size(), arguments.constants["WIDTH"]
    block_count = triton.next_power_of_2(count)
    pieces = max(32 * shape.num_warps // (block_count * shape.block_n), 1)
    aligned = not (width * item % (16 * pieces) or arguments.strides[0] * item % 16)
    aligned = aligned and values_of(bank).data_ptr() % 16 == 0
    even = outputs % shape.block_n == 0 and width % pieces == 0
    # More would push out of the cache what is asked for first.
    fits = targets * count * outputs * width * item <= AHEAD_BYTES
    ahead = known and not gated and aligned and even and fits and bool(options)
    launch(_expert_gemv_kernel, (targets, triton.cdiv(outputs, shape.block_n)))(
        out,
        x,
        experts,
        factor,
        residual,
        *arguments.tensors,
        bias,
        out.stride(0),
        x.stride(0),
        0 if residual is None else residual.stride(0),
        *arguments.strides,
        E=num_experts,
        N=outputs,
        **arguments.constants,
        COUNT=count,
        DIVIDE=top_k if gated else 1,
        GATED=gated,
        FACTOR=not gated,
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        ALPHA=clamp.alpha if clamp else None,
        LIMIT=clamp.limit if clamp else None,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        UNROLL=unroll,
        PREFETCH=str(width * item // pieces) if ahead else None,
        PIECES=pieces,
        BLOCK_COUNT=block_count,
        PDL=bool(options),
        num_warps=shape.num_warps,
        **options,
    )
    return out
