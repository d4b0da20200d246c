"""Few tokens through layers of experts, slot by slot: bound by reading the experts' weights.

    out[s] = silu(g) * u of x[s // top_k] W_eᵀ     or     out[t] = residual[t] + Σ_s c_s x[s] W_eᵀ

with an expert's bias on either product, and another activation.

A slot is a token's choice of an expert e = experts[s]; in the second form, s are a token's slots
and c their weights. The method is gemv.py's, over rows of several weights. A layer takes two
launches and no sorting. Memory: an expert's weight once per slot (concurrent programs share it in
the L2 cache); x once per program.

With programmatic dependent launch the second product prefetches its weights while the first one
runs: the experts are known.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait
from ..quant.dequant_tile import dequant_tile, load_scale, load_zero, part_column
from ..quant.quantized_weight import Weight, even_tile, values_of
from ..tiles import load_tile, prefetch_l2, prefetch_l2_some
from .slots import slots_product, store_slots


@triton.jit
def _dequantized(
    tile,
    scale_ptr,
    zero_ptr,
    rows,
    in_n,
    group,
    stride_scale,
    stride_zero,
    PART: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Return part PART of a tile as float32."""
    if FORMAT.quantized:
        scale = load_scale(scale_ptr, rows, in_n, group, stride_scale, FORMAT)
        zero = load_zero(zero_ptr, rows, in_n, group, stride_zero, FORMAT)
        return dequant_tile(tile, scale, zero, PART, tl.float32, FORMAT, True)
    else:
        return tile.to(tl.float32)


@triton.jit
def _expert_gemv_kernel(
    out_ptr,
    x_ptr,
    experts_ptr,
    factor_ptr,
    residual_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    stride_out,
    stride_x,
    stride_residual,
    stride_weight,
    stride_scale,
    stride_zero,
    E: tl.constexpr,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    COUNT: tl.constexpr,
    DIVIDE: tl.constexpr,
    GATED: tl.constexpr,
    FACTOR: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SQUARED: tl.constexpr,
    FOREIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    PREFETCH: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N outputs (and as many gates) of COUNT slots, which are added up; one row
    of weights per output and slot. FOREIGN: experts may be of another rank; of their slots nothing
    is read, and the first product writes nothing."""
    WIDTH: tl.constexpr = FORMAT.width
    PACK_FACTOR: tl.constexpr = FORMAT.pack_factor
    if FORMAT.run is not None:
        stride_weight = WIDTH  # No gaps: of a constant the compiler knows the alignment.
    ROWS: tl.constexpr = N * 2 if GATED else N
    MASKED: tl.constexpr = FOREIGN and FACTOR
    EVEN_N: tl.constexpr = N % BLOCK_N == 0 and COUNT == BLOCK_COUNT and not MASKED
    EVEN_K: tl.constexpr = WIDTH % BLOCK_K == 0
    target = tl.program_id(0)
    tile_n = tl.program_id(1)
    offs_r = tl.arange(0, BLOCK_COUNT * BLOCK_N)
    offs_n = tile_n * BLOCK_N + offs_r % BLOCK_N
    in_r = (offs_n < N) & (offs_r // BLOCK_N < COUNT)
    slot = target * COUNT + tl.minimum(offs_r // BLOCK_N, COUNT - 1)
    offs_k = tl.arange(0, BLOCK_K)
    if PREFETCH is not None:
        # One chunk per thread. If the ids are not written yet, this prefetches wrong weights and
        # does no other harm: ids read here bypass the cache that they are read from below.
        chunk = tl.arange(0, BLOCK_COUNT * BLOCK_N * CHUNKS)
        place = tl.minimum(chunk // (BLOCK_N * CHUNKS), COUNT - 1)
        ids = tl.load(experts_ptr + target * COUNT + place, cache_modifier=".cg")
        rows = tl.minimum(tl.maximum(ids, 0), E - 1).to(tl.int64) * ROWS
        rows += tile_n * BLOCK_N + chunk // CHUNKS % BLOCK_N
        ptrs = weight_ptr + rows * stride_weight + chunk % CHUNKS * (WIDTH // CHUNKS)
        if FOREIGN:
            prefetch_l2_some(ptrs, (ids >= 0) & (ids < E), PREFETCH)
        else:
            prefetch_l2(ptrs, PREFETCH)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if FOREIGN and not FACTOR:
        only = tl.load(experts_ptr + target)
        if (only < 0) | (only >= E):
            return
    expert = tl.load(experts_ptr + slot)
    if MASKED:
        in_r = in_r & (expert >= 0) & (expert < E)
    # Clamped, so that no other memory is read if the router wrote an invalid id.
    expert = tl.minimum(tl.maximum(expert, 0), E - 1)
    rows = expert.to(tl.int64) * ROWS + offs_n
    ptrs = weight_ptr + rows[:, None] * stride_weight + offs_k[None, :]
    if COUNT == 1 and not MASKED:
        x_ptrs = x_ptr + (target // DIVIDE).to(tl.int64) * stride_x + offs_k[None, :]
    else:
        x_ptrs = x_ptr + (slot // DIVIDE).to(tl.int64)[:, None] * stride_x + offs_k[None, :]
    acc = tl.zeros([BLOCK_COUNT * BLOCK_N, BLOCK_K], tl.float32)
    up_acc = tl.zeros([BLOCK_COUNT * BLOCK_N, BLOCK_K], tl.float32) if GATED else acc
    for base in range(0, WIDTH, BLOCK_K * UNROLL):
        for step in tl.static_range(UNROLL):
            start = base + step * BLOCK_K
            in_k = start + offs_k < WIDTH
            tile = load_tile(ptrs + start, in_r, in_k, EVEN_N, EVEN_K, "evict_first")
            up_tile = tile
            if GATED:
                up_ptrs = ptrs + N * stride_weight + start
                up_tile = load_tile(up_ptrs, in_r, in_k, EVEN_N, EVEN_K, "evict_first")
            for part in tl.static_range(PACK_FACTOR):
                k = part_column(start, part, FORMAT)
                if MASKED:
                    # The first product has not written other ranks' slots.
                    mask = in_r[:, None] & in_k[None, :]
                    x = tl.load(x_ptrs + k, mask=mask, other=0.0).to(tl.float32)
                elif EVEN_K:
                    x = tl.load(x_ptrs + k).to(tl.float32)
                else:
                    x = tl.load(x_ptrs + k, mask=in_k[None, :], other=0.0).to(tl.float32)
                group = k // FORMAT.group_size
                value = _dequantized(
                    tile, scale_ptr, zero_ptr, rows, in_r, group, stride_scale, stride_zero, part,
                    FORMAT,
                )  # fmt: skip
                acc += value * x
                if GATED:
                    value = _dequantized(
                        up_tile, scale_ptr, zero_ptr, rows + N, in_r, group, stride_scale,
                        stride_zero, part, FORMAT,
                    )  # fmt: skip
                    up_acc += value * x
    sums = tl.sum(acc, axis=1)
    up_sums = tl.sum(up_acc, axis=1) if GATED else sums
    store_slots(
        sums, up_sums, out_ptr, bias_ptr, factor_ptr, residual_ptr, stride_out, stride_residual,
        target, tile_n, slot, rows, in_r, N, GATED, BIAS, ALPHA, LIMIT, SQUARED, FACTOR, RESIDUAL,
        BLOCK_COUNT, BLOCK_N,
    )  # fmt: skip


class ExpertGemvConfig(NamedTuple):
    block_n: int
    block_k: int
    unroll: int
    """Most tiles loaded at once"""
    num_warps: int


def expert_gemv_config(weight: Weight, count: int, foreign: bool = False) -> ExpertGemvConfig:
    """Return the tiles, from measurements on an H200 at Qwen3-30B-A3B's sizes in bfloat16, fp8 and
    4 bits.

    `count`: slots that are added up. One: tiles as wide as the row. Several: a program has a few
    rows of each slot. Bytes in groups narrower than the measured ones (mxfp4's): enough rows to
    give each thread 16 bytes of a tile. `foreign`: slots may be other ranks'.
    """
    values = values_of(weight)
    item = values.element_size()
    words = values.dtype == torch.int32
    if item == 1 and (narrow := even_tile(weight, 64)) < 64:
        block_n = max(512 // narrow // triton.next_power_of_2(count), 1)
        return ExpertGemvConfig(block_n, narrow, unroll=2, num_warps=1)
    if count == 1 and words:
        return ExpertGemvConfig(block_n=4, block_k=even_tile(weight, 128), unroll=1, num_warps=1)
    if count == 1:
        block_k = even_tile(weight, 512 if item == 4 else 1024)
        if item == 1:
            return ExpertGemvConfig(2, block_k, unroll=2, num_warps=1)
        num_warps = min(max(block_k * item // 512, 1), 4)
        block_n = 2 if num_warps > 1 else min(max(1024 // (block_k * item), 2), 8)
        return ExpertGemvConfig(block_n, block_k, unroll=1, num_warps=num_warps)
    if foreign and item == 2:
        # A row's tiles at once, which masked loads else wait for in turn; and more rows, of which
        # other ranks' are not read.
        block_n = max(32 // triton.next_power_of_2(count), 1)
        return ExpertGemvConfig(block_n, even_tile(weight, 256), unroll=4, num_warps=4)
    rows = 32 if words else 8
    block_n = max(rows // triton.next_power_of_2(count), 1)
    if words:
        return ExpertGemvConfig(block_n, even_tile(weight, 32), unroll=1, num_warps=4)
    return ExpertGemvConfig(
        block_n, even_tile(weight, 256), unroll=4 if item == 1 else 1, num_warps=2
    )


def expert_gemv(
    x: torch.Tensor,
    experts: torch.Tensor,
    weight: Weight,
    num_experts: int,
    *,
    config: ExpertGemvConfig | None = None,
    known: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Multiply slot by slot; arguments as of `slots_product`.

    `known`: experts were written before the last kernel on the stream began.
    """
    product = slots_product(x, experts, weight, num_experts, **options)
    if product.targets == 0:
        return product.out
    config = config or expert_gemv_config(weight, product.summed, product.foreign)
    values = values_of(weight)
    item, width = values.element_size(), product.width
    tiles = triton.cdiv(width, config.block_k)
    unroll = max(n for n in range(1, config.unroll + 1) if tiles % n == 0)
    chunks = max(32 * config.num_warps // (product.block_count * config.block_n), 1)
    aligned = not (width * item % (16 * chunks) or product.strides[0] * item % 16)
    aligned = aligned and values.data_ptr() % 16 == 0
    even = product.outputs % config.block_n == 0 and width % chunks == 0
    prefetch = known and aligned and even and product.prefetches(width * item)
    launch(_expert_gemv_kernel, (product.targets, triton.cdiv(product.outputs, config.block_n)))(
        *product.tensors,
        *product.strides,
        **product.constants,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        UNROLL=unroll,
        PREFETCH=str(width * item // chunks) if prefetch else None,
        CHUNKS=chunks,
        num_warps=config.num_warps,
    )
    return product.out
