"""One token through a linear layer, with the norm before it and what follows it in one pass.

    out = residual + norm(x) Wᵀ + bias        or, gated,        out = silu(g) * u of the product

A product with one row is bound by reading the weight, so everything that touches only x or out
rides along: the RMSNorm is linear in x but for one scale, which is applied at the end. Memory:
in_features * num_rows_of_weight elements, once; x from the L2 cache once a program. Operations:
2 an element of the weight.

With programmatic dependent launch a program asks for its first tile of the weight, which nobody
writes, before it waits for the kernel that makes x.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launching import gdc_launch_dependents, gdc_wait, pdl_options
from .rehearsal import launch

EARLY_BYTES = 16 << 20
"""From a weight of this size on, the next kernel may start at once: it waits long, but with its
first weights under way. Measured on an H200: Qwen3-8B is faster so, Qwen3-0.6B slower."""


@triton.jit
def _gemv_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    eps,
    stride_weight,
    N: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program BLOCK_N outputs (and as many gates)."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_n = row < N
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    ptrs = weight_ptr + row.to(tl.int64)[:, None] * stride_weight + k[None, :]
    up_ptrs = ptrs + tl.full([], N, tl.int64) * stride_weight
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32) if GATED else acc
    squares = tl.zeros([BLOCK_K], tl.float32)
    if PDL and EARLY:
        gdc_launch_dependents()
    for start in tl.static_range(0, K, BLOCK_K):
        if EVEN_N and EVEN_K:
            weight = tl.load(ptrs + start, eviction_policy="evict_first")
        else:
            mask = in_n[:, None] & (start + k < K)[None, :]
            weight = tl.load(ptrs + start, mask=mask, other=0.0, eviction_policy="evict_first")
        if GATED:
            if EVEN_N and EVEN_K:
                up = tl.load(up_ptrs + start, eviction_policy="evict_first")
            else:
                up = tl.load(up_ptrs + start, mask=mask, other=0.0, eviction_policy="evict_first")
        if PDL and start == 0:
            gdc_wait()
        x = tl.load(x_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        acc += weight.to(tl.float32) * x[None, :]
        if GATED:
            up_acc += up.to(tl.float32) * x[None, :]
    if PDL and not EARLY:
        gdc_launch_dependents()
    out = tl.sum(acc, axis=1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        out *= scale
    if BIAS:
        out += tl.load(bias_ptr + row, mask=in_n, other=0.0).to(tl.float32)
    if GATED:
        up_out = tl.sum(up_acc, axis=1) * scale
        if BIAS:
            up_out += tl.load(bias_ptr + N + row, mask=in_n, other=0.0).to(tl.float32)
        out = out / (1.0 + tl.exp(-out)) * up_out
    if RESIDUAL:
        out += tl.load(residual_ptr + row, mask=in_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=in_n)


class GemvShape(NamedTuple):
    """How the work is cut."""

    block_n: int
    """Outputs a program"""
    block_k: int
    num_warps: int


def gemv_shape(rows: int, size: int, gated: bool) -> GemvShape:
    """For a weight of [rows, size] (`rows` outputs, each with its gate when gated).

    From a sweep over the layers of Qwen3-0.6B and 8B on an H200: few outputs want a program each,
    so that every multiprocessor has some; long rows of middling matrices want many bytes in flight.
    """
    if rows <= 2048 and not gated:
        block_n, block_k, num_warps = 1, 2048, 4
    elif rows <= 8192 and size >= 8192:
        block_n, block_k, num_warps = 4, 512, 4
    elif rows <= 8192 and size >= 4096 and not gated:
        block_n, block_k, num_warps = 4, 2048, 8
    else:
        block_n, block_k, num_warps = 4, 1024, 4
    return GemvShape(block_n, min(triton.next_power_of_2(size), block_k), num_warps)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    shape: GemvShape | None = None,
) -> torch.Tensor:
    """x: [1, in_features], weight: [rows, in_features], last strides 1 → [1, rows], or gated
    [1, rows / 2], of x's type.

    norm: (weight [in_features], eps); bias: [rows]; residual: [1, rows], contiguous, not with
    `gated`. Sums in float32, rounded once.
    """
    rows, size = weight.shape
    rows = rows // 2 if gated else rows
    if residual is not None and gated:
        raise ValueError("a gated product takes no residual")
    shape = shape or gemv_shape(rows, size, gated)
    out = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    options = pdl_options(x.device)
    launch(_gemv_kernel, (triton.cdiv(rows, shape.block_n),))(
        out,
        x,
        weight,
        bias,
        None if norm is None else norm[0],
        residual,
        0.0 if norm is None else norm[1],
        weight.stride(0),
        N=rows,
        K=size,
        NORM=norm is not None,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        PDL=bool(options),
        EARLY=weight.nbytes >= EARLY_BYTES,
        num_warps=shape.num_warps,
        **options,
    )
    return out
