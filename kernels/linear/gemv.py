"""One token through a linear layer, with the norm before it and what follows it in one pass.

    out = residual + factor * activation(norm(x) Wᵀ + bias)
    or, gated,  out = silu(g) * u of the product

A product with one row is bound by reading the weight, so work on x or out is fused into it: the
RMSNorm is linear in x but for one scale, applied at the end. So is a LayerNorm where the sums of
the weight times its parameters are known: its mean and deviation are taken on the way. Where they
are not, each program reads x once more, while its first tile is on its way. A quantized weight is
dequantised in registers; inputs keep their type, so only the weight is rounded.

Memory: the weight once (N * K elements, or N * K * bits / 8 bytes and 2 to 4 bytes per group); x
from the L2 cache once per program. Operations: 2 per element, and about 2 more to unpack an element
of a word.

With programmatic dependent launch a program loads its first tile of the weight, which no kernel
writes, before it waits for the kernel that computes x.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..activations import ACTIVATIONS
from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from ..quant.dequant_tile import dequant_tile, load_scale, load_zero, part_column
from ..quant.quantized_weight import (
    Weight,
    largest_tile,
    values_of,
    weight_arguments,
)
from ..tiles import (
    ASKED_BYTES,
    ask_for_later_rows,
    load_pair,
    load_tile,
    prefetch_l2_vector,
    row_epilogue,
)

EARLY_BYTES = 16 << 20
"""Size of the weight from which the next kernel may start at once and load its first weights.
Measured on an H200: this makes Qwen3-8B faster and Qwen3-0.6B slower."""


@triton.jit
def _dequantized(
    tile,
    scale_ptr,
    zero_ptr,
    offs_n,
    in_n,
    group,
    stride_scale,
    stride_zero,
    PART: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Return part PART of a tile as float32."""
    if SCALED:
        scale = load_scale(scale_ptr, offs_n, in_n, group, stride_scale, FORMAT)
        zero = load_zero(zero_ptr, offs_n, in_n, group, stride_zero, FORMAT)
        return dequant_tile(tile, scale, zero, PART, tl.float32, FORMAT, True)
    else:
        return tile.to(tl.float32)


@triton.jit
def _moments(x_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < SIZE
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / SIZE
    x = tl.where(mask, x - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)


@triton.jit
def _add_pairs(left, left_square, right, right_square):
    return left + right, left_square + right_square


@triton.jit
def _scale_of(totals, squares, eps, SIZE: tl.constexpr, CENTERED: tl.constexpr):
    """Return the mean and scale of a norm from sums over parts of x and of its squares."""
    if CENTERED:
        total, square = tl.reduce((totals, squares), 0, _add_pairs)
        mean = total / SIZE
        return mean, tl.rsqrt(tl.maximum(square / SIZE - mean * mean, 0.0) + eps)
    else:
        return 0.0, tl.rsqrt(tl.sum(squares, axis=0) / SIZE + eps)


@triton.jit(do_not_specialize=["ahead"])
def _gemv_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    norm_ptr,
    norm_bias_ptr,
    sums_ptr,
    residual_ptr,
    eps,
    ahead,
    stride_weight,
    stride_scale,
    stride_zero,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    NORM: tl.constexpr,
    CENTERED: tl.constexpr,
    NORM_BIAS: tl.constexpr,
    SUMMED: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PDL: tl.constexpr,
    EARLY_LAUNCH: tl.constexpr,
    AHEAD: tl.constexpr,
):
    WIDTH: tl.constexpr = FORMAT.width
    PACK_FACTOR: tl.constexpr = FORMAT.pack_factor
    GROUP: tl.constexpr = FORMAT.group_size
    # If a row has one scale, it is applied to the sum.
    SCALED: tl.constexpr = FORMAT.grouped or FORMAT.has_zero or FORMAT.pack_factor > 1
    if FORMAT.run is not None:
        stride_weight = WIDTH  # No gaps: of a constant the compiler knows the alignment.
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = WIDTH % BLOCK_K == 0
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    in_n = offs_n < N
    ptrs = weight_ptr + offs_n.to(tl.int64)[:, None] * stride_weight + offs_k[None, :]
    up_ptrs = ptrs + tl.full([], N, tl.int64) * stride_weight
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32) if GATED else acc
    squares = tl.zeros([BLOCK_K], tl.float32)
    totals = squares
    mean = tl.full([], 0.0, tl.float32)
    norm_scale = tl.full([], 1.0, tl.float32)
    residual = tl.zeros([BLOCK_N], tl.float32)
    if PDL and EARLY_LAUNCH:
        gdc_launch_dependents()
    # What comes after the product is loaded before it, so that nothing waits for it at the end.
    bias, up_bias = load_pair(bias_ptr, offs_n, in_n, N, GATED, BIAS)
    sums, up_sums = load_pair(sums_ptr, offs_n, in_n, N, GATED, SUMMED)
    offset, up_offset = load_pair(norm_bias_ptr, offs_n, in_n, N, GATED, SUMMED and NORM_BIAS)
    ONE_PASS: tl.constexpr = BLOCK_K * UNROLL >= WIDTH
    MOMENTS: tl.constexpr = NORM and (SUMMED or not CENTERED)
    for base in range(0, WIDTH, BLOCK_K * UNROLL):
        for step in tl.static_range(UNROLL):
            start = base + step * BLOCK_K
            in_k = start + offs_k < WIDTH
            tile = load_tile(ptrs + start, in_n, in_k, EVEN_N, EVEN_K, "evict_first")
            up_tile = tile
            if GATED:
                up_tile = load_tile(up_ptrs + start, in_n, in_k, EVEN_N, EVEN_K, "evict_first")
            if step == 0:
                if base == 0:
                    if AHEAD:
                        ask_for_later_rows(weight_ptr, ahead, N, WIDTH, GATED, BLOCK_N)
                    if PDL:
                        if NORM:
                            # Of another layer than before, so it is in no cache.
                            if tl.program_id(0) == 0:
                                prefetch_l2_vector(norm_ptr, WIDTH * PACK_FACTOR)
                                if NORM_BIAS and not SUMMED:
                                    prefetch_l2_vector(norm_bias_ptr, WIDTH * PACK_FACTOR)
                        gdc_wait()
                    if CENTERED and not SUMMED:
                        mean, norm_scale = _moments(x_ptr, eps, WIDTH * PACK_FACTOR, BLOCK_X)
            for part in tl.static_range(PACK_FACTOR):
                k = part_column(start, part, FORMAT)
                if EVEN_K:
                    x = tl.load(x_ptr + k + offs_k).to(tl.float32)
                else:
                    x = tl.load(x_ptr + k + offs_k, mask=in_k, other=0.0).to(tl.float32)
                if RESIDUAL and ONE_PASS and step == 0 and part == 0:
                    residual = tl.load(residual_ptr + offs_n, mask=in_n, other=0.0).to(tl.float32)
                if MOMENTS:
                    squares += x * x
                    if SUMMED:
                        totals += x
                if NORM:
                    if CENTERED and not SUMMED:
                        x = (x - mean) * norm_scale
                    if EVEN_K:
                        norm = tl.load(norm_ptr + k + offs_k)
                    else:
                        norm = tl.load(norm_ptr + k + offs_k, mask=in_k, other=0.0)
                    x *= norm.to(tl.float32)
                    if NORM_BIAS and not SUMMED:
                        norm = tl.load(norm_bias_ptr + k + offs_k, mask=in_k, other=0.0)
                        x += norm.to(tl.float32)
                value = _dequantized(
                    tile, scale_ptr, zero_ptr, offs_n, in_n, k // GROUP, stride_scale,
                    stride_zero, part, FORMAT, SCALED,
                )  # fmt: skip
                acc += value * x[None, :]
                if GATED:
                    value = _dequantized(
                        up_tile, scale_ptr, zero_ptr, N + offs_n, in_n, k // GROUP, stride_scale,
                        stride_zero, part, FORMAT, SCALED,
                    )  # fmt: skip
                    up_acc += value * x[None, :]
    if PDL and not EARLY_LAUNCH:
        gdc_launch_dependents()
    if RESIDUAL and not ONE_PASS:
        residual = tl.load(residual_ptr + offs_n, mask=in_n, other=0.0).to(tl.float32)
    out = tl.sum(acc, axis=1)
    up_out = out
    if FORMAT.quantized and GATED:
        up_out = tl.sum(up_acc, axis=1)
    if FORMAT.quantized and not SCALED:
        scale_ptrs = scale_ptr + offs_n // FORMAT.scale_rows
        out *= tl.load(scale_ptrs, mask=in_n, other=0.0).to(tl.float32)
        if GATED:
            scale_ptrs = scale_ptr + (N + offs_n) // FORMAT.scale_rows
            up_out *= tl.load(scale_ptrs, mask=in_n, other=0.0).to(tl.float32)
    if MOMENTS:
        mean, norm_scale = _scale_of(totals, squares, eps, WIDTH * PACK_FACTOR, SUMMED)
        if SUMMED:
            out -= mean * sums
        out = out * norm_scale + offset
    if GATED:
        if not FORMAT.quantized:
            # After the gate's sums, so that the compiler converts a dense weight's numbers later:
            # 127 registers for Qwen3-8B's gate and up instead of 152, and 46 us instead of 56.
            up_out = tl.sum(up_acc, axis=1)
        if MOMENTS:
            if SUMMED:
                up_out -= mean * up_sums
            up_out = up_out * norm_scale + up_offset
    row_epilogue(
        out, up_out, out_ptr, bias, up_bias, residual, offs_n, N, GATED, ACTIVATION, FACTOR
    )


class GemvConfig(NamedTuple):
    block_n: int
    block_k: int
    """Elements of a row (numbers, or words) at a time, at most"""
    num_warps: int
    early: bool | None = None
    """Whether the next kernel may start, and load its first weights, while this one runs; None: by
    EARLY_BYTES."""
    ahead: int = 0
    """Prefetch the dense weight of the program this many places on while waiting for x: about as
    many as run at once."""


def starts_next_early(config: GemvConfig, num_bytes: int) -> bool:
    return num_bytes >= EARLY_BYTES if config.early is None else config.early


def gemv_config(weight: Weight, gated: bool) -> GemvConfig:
    """Return the tiles for a weight without measured ones.

    From bfloat16, fp8 and 4-bit sweeps on an H200 (docs/benchmarks/kernels.jsonl): few outputs need
    one program each, so that every multiprocessor has some; long rows of medium-sized matrices need
    many bytes in flight; rows of 3,584 numbers, or a whole vocabulary of long rows, one tile per
    row.
    """
    values = values_of(weight)
    outputs, width = values.shape
    outputs = outputs // 2 if gated else outputs
    if values.device.type == "cpu":
        # Triton's interpreter takes milliseconds per program, whatever its size.
        return GemvConfig(32, 2048, 4)
    if isinstance(weight, torch.Tensor):
        whole = width > 2560 and outputs > 65536
        if 2048 < width <= 4096 and (whole or (gated and width % 1024)):
            return GemvConfig(2, 4096, 4)
        if 2048 < width < 4096 and width % 1024 and 4096 < outputs <= 8192:
            return GemvConfig(4, 4096, 8)
        if 2048 < width <= 2560 and outputs > 8192 and not gated:
            return GemvConfig(2, 2048, 2)
        if 2048 < width < 4096 and width % 1024 and not width % 512:
            return GemvConfig(4, 512, 4)
        if outputs <= 2048 and not gated:
            return GemvConfig(1, 2048, 4)
        if outputs <= 8192 and width >= 8192:
            return GemvConfig(4, 512, 4) if gated else GemvConfig(2, 2048, 4)
        if width == 4096:
            return GemvConfig(2, 1024, 4)
        if outputs <= 8192 and width > 4096 and not gated:
            return GemvConfig(2, 1024, 2)
        return GemvConfig(4, 1024, 4)
    if weight.pack_factor > 1:
        # With one warp, a row of a tile is one load of the warp, and inputs have the tile's layout.
        return GemvConfig(2 if width >= 1024 else 4, 128, 1)
    if outputs <= 2048 and not gated:
        return GemvConfig(1, 2048, 4)
    if outputs <= 4096 and not gated:
        return GemvConfig(4, 2048, 2)
    return GemvConfig(4, 4096, 4)


def _unroll(weight: Weight, tiles: int) -> int:
    """Return the tiles per loop iteration: all, unless a program would be megabytes of code."""
    if isinstance(weight, torch.Tensor) or (weight.pack_factor == 1 and tiles <= 16):
        return tiles
    return next(count for count in (4, 3, 2, 1) if tiles % count == 0)


def _in_one_piece(weight: Weight, block_n: int) -> bool:
    """Return whether `ask_for_later_rows` can prefetch a program's rows."""
    if not isinstance(weight, torch.Tensor) or not weight.is_contiguous():
        return False
    size = weight.stride(0) * weight.element_size()
    return size % 16 == 0 and block_n * size >= ASKED_BYTES


def gemv(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    layer_norm: tuple[torch.Tensor, torch.Tensor | None, float] | None = None,
    norm_sums: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    activation: str = "",
    factor: float = 1.0,
    config: GemvConfig | None = None,
) -> torch.Tensor:
    """x: [1, K], last stride 1; weight: [N, K] → [1, N], or gated [1, N / 2], of x's type.

    norm: of an RMSNorm (weight [K], eps); layer_norm: (weight [K], bias [K], eps); norm_sums: of a
    dense weight times the latter's weight, and times its bias with `bias` added, [N] float32 each,
    used for x of 16 bits: in float32 the variance would cancel; bias: [N]; residual: [1, N],
    contiguous, not with `gated`; activation: a name of ACTIVATIONS, not with `gated`; factor: of
    the product, before the residual is added. Sums in float32, rounded once.
    """
    if (residual is not None or activation) and gated:
        raise ValueError("a gated product takes no residual and no other activation")
    factors, offsets, eps = layer_norm or (None, None, 0.0)
    if norm is not None:
        factors, eps = norm
    values = values_of(weight)
    rows, width = values.shape
    outputs = rows // 2 if gated else rows
    sums = None
    if norm_sums is not None and x.dtype != torch.float32 and isinstance(weight, torch.Tensor):
        sums, offsets = norm_sums
        bias = None  # It is part of the offsets: one load fewer of each output.
    config = config or gemv_config(weight, gated)
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    block_k = largest_tile(weight, config.block_k)
    options = pdl_options(x.device)
    arguments = weight_arguments(weight)
    launch(_gemv_kernel, (triton.cdiv(outputs, config.block_n),))(
        out,
        x,
        *arguments.tensors,
        bias,
        factors,
        offsets,
        sums,
        residual,
        eps,
        config.ahead,
        *arguments.strides,
        N=outputs,
        FORMAT=arguments.format,
        NORM=factors is not None,
        CENTERED=layer_norm is not None,
        NORM_BIAS=offsets is not None,
        SUMMED=sums is not None,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        ACTIVATION=ACTIVATIONS[activation] if activation else "",
        FACTOR=factor,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        UNROLL=_unroll(weight, triton.cdiv(width, block_k)),
        BLOCK_X=triton.next_power_of_2(x.shape[1]) if layer_norm and sums is None else 1,
        PDL=bool(options),
        EARLY_LAUNCH=starts_next_early(config, values.nbytes),
        AHEAD=config.ahead > 0 and bool(options) and _in_one_piece(weight, config.block_n),
        num_warps=config.num_warps,
        **options,
    )
    return out
