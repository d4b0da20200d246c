"""Few tokens through a linear layer, bound by reading the weight, with what follows it in one pass.

    out = residual + x Wᵀ + bias        or, gated,        out = silu(g) * u of the product

For some 2 to 128 rows. The weight's rows take the tensor core's long side and the tokens its short
one, so few tokens waste little. A program multiplies a band of outputs, or a share of one: shares
are summed by whichever of them is done last. Memory: the weight once; x from the L2 cache once a
band. Operations: 2 * num_rows an element of the weight.

With programmatic dependent launch a program asks for its part of the weight, which nobody writes,
before it waits for the kernel that makes x: the memory stays busy where one product ends and the
next begins.
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


@triton.jit
def ask_for(ptrs, BYTES: tl.constexpr):
    """Start BYTES from each of ptrs on their way to the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], " + BYTES + "; mov.u32 $0, 0;",
        "=r,l",
        [ptrs],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def finish_share(
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
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The end of a program: acc (and up_acc), [BLOCK_N, BLOCK_M] float32, are its share of outputs
    `output` for rows `row`. Whoever is last of SPLIT stores their sum with all that follows."""
    in_n = output < N
    mask = in_n[:, None] & (row < num_rows)[None, :]
    if SPLIT > 1:
        split = tl.program_id(2)
        # [SPLIT, num_rows, N], and the same again for gates' partners.
        place = row.to(tl.int64)[None, :] * N + output[:, None]
        whole = num_rows.to(tl.int64) * N
        tl.store(partial_ptr + split * whole + place, acc, mask=mask)
        if GATED:
            tl.store(partial_ptr + (SPLIT + split) * whole + place, up_acc, mask=mask)
        tl.debug_barrier()
        counter = counter_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") != SPLIT - 1:
            return
        tl.store(counter, 0)
        # In the order of the shares, whoever is last: the same sum every time.
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if GATED:
            up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for share in tl.static_range(SPLIT):
            part = partial_ptr + share * whole + place
            acc += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
            if GATED:
                part += SPLIT * whole
                up_acc += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
    if BIAS:
        acc += tl.load(bias_ptr + output, mask=in_n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            bias = tl.load(bias_ptr + N + output, mask=in_n, other=0.0)
            up_acc += bias.to(tl.float32)[:, None]
        acc = acc / (1.0 + tl.exp(-acc)) * up_acc
    if RESIDUAL:
        place = row.to(tl.int64)[None, :] * stride_residual + output[:, None]
        acc += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    place = row.to(tl.int64)[None, :] * stride_out + output[:, None]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_kernel(
    out_ptr,
    partial_ptr,
    counter_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    num_rows,
    stride_out,
    stride_x,
    stride_weight,
    stride_residual,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program BLOCK_N outputs (and as many gates) of BLOCK_M rows, over 1 / SPLIT of K."""
    band = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    output = band * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_n = output < N
    in_m = row < num_rows
    EVEN_N: tl.constexpr = N % BLOCK_N == 0
    SHARE: tl.constexpr = ((K + SPLIT - 1) // SPLIT + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    EVEN_K: tl.constexpr = K == SHARE * SPLIT
    begin = split * SHARE
    rows_of_weight = weight_ptr + output.to(tl.int64) * stride_weight + begin
    above = tl.full([], N, tl.int64) * stride_weight
    if PREFETCH is not None and EVEN_N and EVEN_K:
        ask_for(rows_of_weight, PREFETCH)
        if GATED:
            ask_for(rows_of_weight + above, PREFETCH)
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    weight_ptrs = rows_of_weight[:, None] + k[None, :]
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * stride_x + begin + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) if GATED else acc
    for start in tl.range(0, SHARE, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs + start, mask=in_m[:, None], other=0.0)
        else:
            in_k = begin + start + k < K
            x = tl.load(x_ptrs + start, mask=in_m[:, None] & in_k[None, :], other=0.0)
        if EVEN_N and EVEN_K:
            weight = tl.load(weight_ptrs + start)
        elif EVEN_K:
            weight = tl.load(weight_ptrs + start, mask=in_n[:, None], other=0.0)
        else:
            weight = tl.load(weight_ptrs + start, mask=in_n[:, None] & in_k[None, :], other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
        if GATED:
            if EVEN_N and EVEN_K:
                up = tl.load(weight_ptrs + above + start)
            elif EVEN_K:
                up = tl.load(weight_ptrs + above + start, mask=in_n[:, None], other=0.0)
            else:
                mask = in_n[:, None] & in_k[None, :]
                up = tl.load(weight_ptrs + above + start, mask=mask, other=0.0)
            up_acc = tl.dot(up, tl.trans(x), up_acc, input_precision="ieee")
    if PDL and not EARLY:
        gdc_launch_dependents()
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


class SkinnyShape(NamedTuple):
    """How the work is cut."""

    block_m: int
    """Rows a program"""
    block_n: int
    """Outputs a program"""
    block_k: int
    split: int
    """Programs that share one block of outputs"""
    num_warps: int
    num_stages: int
    prefetch: int
    """Bytes of each of its weight's rows that a program asks for ahead; 0: none."""
    early: bool
    """The next kernel may start at once, not only when this one has read its weight."""


class SkinnyWorkspace(NamedTuple):
    """Room for shares of sums. Any number of products may use it in turn."""

    floats: torch.Tensor
    """[at least `elements(...)`] float32, contents free."""
    counters: torch.Tensor
    """[at least `MAX_TILES`] int32, zeros before and after."""


MAX_TILES = 4096
"""Blocks of outputs of a product that is split."""


def elements(num_rows: int, outputs: int, split: int, gated: bool) -> int:
    """Floats that `skinny` needs in its workspace. `outputs`: gates not counted."""
    return num_rows * outputs * split * (2 if gated else 1) if split > 1 else 0


def skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    shape: SkinnyShape,
    workspace: SkinnyWorkspace | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: [num_rows, in_features], weight: [rows, in_features], last strides 1 → [num_rows, rows],
    or gated [num_rows, rows / 2], of x's type.

    bias: [rows]; residual: as the result, not with `gated`; `out` may be the residual. Sums in
    float32, rounded once. `workspace`: needed where `shape.split` is above 1.
    """
    num_rows, size = x.shape
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    if residual is not None and gated:
        raise ValueError("a gated product takes no residual")
    bands, blocks = triton.cdiv(rows, shape.block_n), triton.cdiv(num_rows, shape.block_m)
    if shape.split > 1:
        needed = elements(num_rows, rows, shape.split, gated)
        if workspace is None or workspace.floats.numel() < needed:
            raise ValueError(f"{shape.split} shares need a workspace of {needed} floats")
        if bands * blocks > workspace.counters.numel():
            raise ValueError(f"{bands * blocks} blocks of outputs need as many counters")
    if out is None:
        out = torch.empty((num_rows, rows), dtype=x.dtype, device=x.device)
    options = pdl_options(x.device)
    share = triton.cdiv(triton.cdiv(size, shape.split), shape.block_k) * shape.block_k
    ahead = min(shape.prefetch, share * weight.element_size()) // 16 * 16 if options else 0
    launch(_skinny_kernel, (bands, blocks, shape.split))(
        out,
        workspace.floats if workspace is not None else out,
        workspace.counters if workspace is not None else out,
        x,
        weight,
        bias,
        residual,
        num_rows,
        out.stride(0),
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        N=rows,
        K=size,
        SPLIT=shape.split,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        PREFETCH=str(ahead) if ahead else None,
        PDL=bool(options),
        EARLY=shape.early,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        **options,
    )
    return out
