"""The experts of each token: softmax over all, the largest few, perhaps renormalised.

Memory: reads num_experts logits a token and writes 8 bytes a choice. Small: bound by the latency of
top_k reductions one after the other. So a warp has a row for itself, and probabilities are compared
as integers, whose order is the same: of these a warp finds the largest in one instruction.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import gdc_launch_dependents, gdc_wait, pdl_options
from .rehearsal import launch

ROWS = 4
"""Tokens a program, at most; one a warp."""
LOWEST = tl.constexpr(-(1 << 31))
"""Below every probability, and below what is no number."""


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    weights_ptr,
    experts_ptr,
    logits_ptr,
    num_tokens,
    stride_logits,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program ROWS tokens."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK_E)
    place = tl.arange(0, BLOCK_TOP)
    in_t = token < num_tokens
    in_e = expert < E
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ptrs = logits_ptr + token.to(tl.int64)[:, None] * stride_logits + expert[None, :]
    logits = tl.load(ptrs, mask=in_t[:, None] & in_e[None, :], other=0.0).to(tl.float32)
    logits = tl.where(in_e[None, :], logits, float("-inf"))
    grown = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    left = (grown / tl.sum(grown, axis=1)[:, None]).to(tl.int32, bitcast=True)
    left = tl.where(in_e[None, :], left, LOWEST)
    weights = tl.zeros([ROWS, BLOCK_TOP], tl.float32)
    experts = tl.zeros([ROWS, BLOCK_TOP], tl.int32)
    total = tl.zeros([ROWS], tl.float32)
    for number in tl.static_range(TOP_K):
        highest = tl.max(left, axis=1)
        at = tl.min(tl.where(left == highest[:, None], expert[None, :], BLOCK_E), axis=1)
        best = highest.to(tl.float32, bitcast=True)
        weights = tl.where((place == number)[None, :], best[:, None], weights)
        experts = tl.where((place == number)[None, :], at[:, None], experts)
        total += best
        left = tl.where(expert[None, :] == at[:, None], LOWEST, left)
    if RENORMALIZE:
        weights /= total[:, None]
    target = token[:, None] * TOP_K + place[None, :]
    mask = in_t[:, None] & (place < TOP_K)[None, :]
    tl.store(weights_ptr + target, weights, mask=mask)
    tl.store(experts_ptr + target, experts, mask=mask)


def route(
    logits: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: [num_tokens, num_experts], last stride 1 → weights [num_tokens, top_k] float32 and
    experts [num_tokens, top_k] int32, the weightiest first; of equal ones the lower number.

    All of a row's experts are different, and experts, whatever its logits are.
    """
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    if num_tokens == 0:
        return weights, experts
    rows = ROWS if num_tokens > 1 else 1
    options = pdl_options(logits.device)
    launch(_route_kernel, (triton.cdiv(num_tokens, rows),))(
        weights,
        experts,
        logits,
        num_tokens,
        logits.stride(0),
        E=num_experts,
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        ROWS=rows,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_TOP=triton.next_power_of_2(top_k),
        PDL=bool(options),
        num_warps=rows,
        **options,
    )
    return weights, experts
