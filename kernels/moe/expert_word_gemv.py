"""Few tokens through layers of experts in 4 bits, slot by slot, on the tensor core.

What expert_gemv.py computes, by int4_gemv.py's method: each word holds 8 columns, so a tile needs 8
slices of x, which fill the MMA's N = 8. Only the diagonal (part i times slice i) is kept, and
scaled. Float32 units would need three times as many instructions: more time than reading.

Each warp takes some tiles of one slot's rows. Memory: an expert's words, scales and zeros once per
slot; x from the L2 cache once per program. Instructions: about 2 per integer, 3 per float.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait
from ..quant.diagonal_sums import scaled_sums, word_constants
from ..quant.int4_unpack import int4_tile
from ..quant.quantized_weight import QuantizedWeight, Weight
from ..tiles import prefetch_l2, prefetch_l2_some
from .slots import slots_product, store_slots

BLOCK_N = tl.constexpr(16)
"""Outputs per program: the MMA's long side."""
PARTS = tl.constexpr(8)
SMALLEST_TILE = 16


@triton.jit
def _expert_word_gemv_kernel(
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
    BLOCK_COUNT: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_N outputs (and as many gates) of COUNT slots, which are added up; SPLIT
    warps share a slot. FOREIGN: as of `_expert_gemv_kernel`."""
    WIDTH: tl.constexpr = FORMAT.width
    FLOATS: tl.constexpr = FORMAT.run is not None
    ZERO: tl.constexpr = FORMAT.has_zero
    WARPS: tl.constexpr = BLOCK_COUNT * SPLIT
    ROWS: tl.constexpr = N * 2 if GATED else N
    target = tl.program_id(0)
    tile_n = tl.program_id(1)
    # Slot by slot, BLOCK_N outputs each.
    offs_r = tl.arange(0, BLOCK_COUNT * BLOCK_N)
    slot_r = target * COUNT + tl.minimum(offs_r // BLOCK_N, COUNT - 1)
    offs_n = tile_n * BLOCK_N + offs_r % BLOCK_N
    if PREFETCH is not None:
        # As in `_expert_gemv_kernel`: at worst, of wrong weights.
        ids = tl.load(experts_ptr + slot_r, cache_modifier=".cg")
        rows = tl.minimum(tl.maximum(ids, 0), E - 1).to(tl.int64) * ROWS
        rows += tl.minimum(offs_n, N - 1)
        ptrs = weight_ptr + rows * WIDTH
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
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    warp = tl.arange(0, WARPS)
    place = warp // SPLIT
    slot = target * COUNT + tl.minimum(place, COUNT - 1)
    expert = tl.load(experts_ptr + slot)
    serves = place < COUNT
    if FOREIGN:
        serves = serves & (expert >= 0) & (expert < E)
    # Clamped, so that no other memory is read if the router wrote an invalid id.
    expert = tl.minimum(tl.maximum(expert, 0), E - 1)
    outputs = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = outputs < N
    rows = (expert.to(tl.int64) * ROWS)[:, None] + outputs[None, :]
    in_rows = serves[:, None] & in_n[None, :]
    offs_k = tl.arange(0, BLOCK_K)[None, None, :]
    offs_part = tl.arange(0, PARTS)[None, :]
    parts = offs_part[None, :, :]
    # Where each warp begins.
    begin = (warp % SPLIT) * BLOCK_K
    weight_ptrs = weight_ptr + (rows * WIDTH)[:, :, None] + begin[:, None, None] + offs_k
    up_offset = tl.full([], N, tl.int64) * WIDTH
    x_ptrs = x_ptr + ((slot // DIVIDE).to(tl.int64) * stride_x)[:, None, None] + offs_k
    scale_ptrs = scale_ptr + rows[:, :, None]
    zero_ptrs = zero_ptr
    if ZERO:
        zero_ptrs = zero_ptr + rows[:, :, None]
    acc = tl.zeros([WARPS, BLOCK_N, PARTS], tl.float32)
    up_acc = acc
    constants = word_constants(dtype, ZERO, FORMAT.offset, WARPS, BLOCK_N, BLOCK_K)
    correction = tl.zeros([WARPS, BLOCK_N, PARTS], tl.float32)
    for start in tl.range(0, WIDTH, SPLIT * BLOCK_K, num_stages=STAGES):
        first = start + begin
        # Words of the tile: there may be none for a warp, and of floats the last run be shorter.
        count = tl.minimum(WIDTH - first, BLOCK_K)
        in_run = (offs_k < count[:, None, None]) & serves[:, None, None]
        in_tile = in_rows[:, :, None] & in_run
        words = tl.load(weight_ptrs + start, mask=in_tile, other=0, eviction_policy="evict_first")
        if FORMAT.run is None:
            column = offs_part * WIDTH + first[:, None]
        else:
            column = PARTS * first[:, None] + offs_part * count[:, None]
        x = tl.load(x_ptrs + column[:, :, None], mask=in_run, other=0.0)
        x = tl.permute(x, (0, 2, 1))
        group = (column // FORMAT.group_size)[:, None, :]
        scaled = in_rows[:, :, None] & (count > 0)[:, None, None]
        scale = tl.load(scale_ptrs + group * stride_scale, mask=scaled, other=0.0)
        if GATED:
            up_words = tl.load(
                weight_ptrs + up_offset + start, mask=in_tile, other=0,
                eviction_policy="evict_first",
            )  # fmt: skip
            up_scale = tl.load(scale_ptrs + N + group * stride_scale, mask=scaled, other=0.0)
        if not FLOATS:
            correction = tl.dot(constants, x, input_precision="ieee")
        zeros = zero_ptrs
        if ZERO:
            zeros = zero_ptrs + group * stride_zero
        acc += scaled_sums(words, x, scale, zeros, scaled, parts, correction, FLOATS, ZERO)
        if GATED:
            if ZERO:
                zeros += N
            up_acc += scaled_sums(
                up_words, x, up_scale, zeros, scaled, parts, correction, FLOATS, ZERO
            )
    sums = _slot_sums(acc, BLOCK_COUNT, SPLIT)
    up_sums = _slot_sums(up_acc, BLOCK_COUNT, SPLIT) if GATED else sums
    expert = tl.load(experts_ptr + slot_r)
    in_r = (offs_n < N) & (offs_r // BLOCK_N < COUNT)
    if FOREIGN:
        in_r = in_r & (expert >= 0) & (expert < E)
    rows = tl.minimum(tl.maximum(expert, 0), E - 1).to(tl.int64) * ROWS + offs_n
    store_slots(
        sums, up_sums, out_ptr, bias_ptr, factor_ptr, residual_ptr, stride_out, stride_residual,
        target, tile_n, slot_r, rows, in_r, N, GATED, BIAS, ALPHA, LIMIT, SQUARED, FACTOR,
        RESIDUAL, BLOCK_COUNT, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _slot_sums(acc, BLOCK_COUNT: tl.constexpr, SPLIT: tl.constexpr):
    """[BLOCK_COUNT * SPLIT, BLOCK_N, 8] → [BLOCK_COUNT * BLOCK_N]"""
    sums = tl.reshape(tl.sum(acc, axis=2), [BLOCK_COUNT, SPLIT, BLOCK_N])
    return tl.reshape(tl.sum(sums, axis=1), [BLOCK_COUNT * BLOCK_N])


class ExpertWordConfig(NamedTuple):
    split: int
    block_k: int
    """Most words of a row that a warp takes at a time; for floats, of a run"""
    num_stages: int


def expert_word_config(count: int) -> ExpertWordConfig:
    """Return the configuration for `count` summed slots."""
    return ExpertWordConfig(max(4 // triton.next_power_of_2(count), 1), 32, 3)


def _tile(weight: QuantizedWeight, limit: int) -> int:
    """Return the words of a row per tile; 0: the tensor core cannot take them."""
    return weight.e2m1_run or int4_tile(weight, limit)


def takes_words(weight: Weight, x: torch.Tensor) -> TypeGuard[QuantizedWeight]:
    """Return whether the tensor core can take the weight's 4-bit numbers as x's type."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if isinstance(weight, torch.Tensor) or not _tile(weight, SMALLEST_TILE):
        return False
    if not weight.values.is_contiguous():
        return False
    return x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) >= (9, 0)


def expert_word_gemv(
    x: torch.Tensor,
    experts: torch.Tensor,
    weight: QuantizedWeight,
    num_experts: int,
    *,
    config: ExpertWordConfig | None = None,
    known: bool = False,
    **options: Any,
) -> torch.Tensor:
    """As `expert_gemv`, for what `takes_words` says."""
    product = slots_product(x, experts, weight, num_experts, **options)
    if product.targets == 0:
        return product.out
    config = config or expert_word_config(product.summed)
    row_bytes = 4 * product.width
    prefetch = known and row_bytes % 16 == 0 and product.prefetches(row_bytes)
    grid = product.targets, triton.cdiv(product.outputs, BLOCK_N.value)
    launch(_expert_word_gemv_kernel, grid)(
        *product.tensors,
        *product.strides[1:],
        **product.constants,
        SPLIT=config.split,
        BLOCK_K=_tile(weight, config.block_k),
        STAGES=config.num_stages,
        PREFETCH=str(row_bytes) if prefetch else None,
        num_warps=product.block_count * config.split,
    )
    return product.out
