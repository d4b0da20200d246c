"""Weighted sum of the outputs of a token's experts.

    out[t] = residual[t] + Σ_j weights[t, j] * parts[t * top_k + j]

Memory: reads top_k + 1 rows per token and writes one; bound by it. Sums in a fixed order. Parts of
another rank's experts, which no kernel has written, are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options

LARGEST_BLOCK = 1024


@triton.jit
def _combine_kernel(
    out_ptr,
    parts_ptr,
    weights_ptr,
    residual_ptr,
    experts_ptr,
    stride_out,
    stride_residual,
    RESIDUAL: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK elements of one token. OWN: None, or so many experts are this rank's."""
    token = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_n < SIZE
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    if RESIDUAL:
        residual_ptrs = residual_ptr + token * stride_residual + offs_n
        total += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    for place in tl.static_range(TOP_K):
        in_part = mask
        if OWN is not None:
            expert = tl.load(experts_ptr + token * TOP_K + place)
            in_part = mask & (expert >= 0) & (expert < OWN)
        part = tl.load(parts_ptr + (token * TOP_K + place) * SIZE + offs_n, mask=in_part, other=0.0)
        total += part.to(tl.float32) * tl.load(weights_ptr + token * TOP_K + place)
    tl.store(out_ptr + token * stride_out + offs_n, total.to(out_ptr.dtype.element_ty), mask=mask)


def combine(
    parts: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    *,
    experts: torch.Tensor | None = None,
    own: int | None = None,
) -> torch.Tensor:
    """parts: [num_tokens * top_k, size] and weights: [num_tokens, top_k] float32, contiguous;
    residual, if there is one, and out: [num_tokens, size], perhaps the same, last strides 1 → out.
    Sums in float32, rounded once. With `own`, parts whose expert, [num_tokens, top_k] int32, is not
    below it, or is negative, are left out."""
    num_tokens, size = out.shape
    if num_tokens == 0:
        return out
    block = min(triton.next_power_of_2(size), LARGEST_BLOCK)
    options = pdl_options(out.device)
    launch(_combine_kernel, (num_tokens, triton.cdiv(size, block)))(
        out,
        parts,
        weights,
        residual,
        experts,
        out.stride(0),
        0 if residual is None else residual.stride(0),
        RESIDUAL=residual is not None,
        SIZE=size,
        TOP_K=weights.shape[1],
        OWN=own,
        BLOCK=block,
        PDL=bool(options),
        num_warps=4,
        **options,
    )
    return out
