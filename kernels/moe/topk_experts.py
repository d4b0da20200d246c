"""Chooses the experts of each token: the top_k largest scores, by softmax or sigmoid, plus bias.

Memory: reads num_experts logits per token and writes 8 bytes per choice. Bound by the latency of
top_k sequential reductions. So each row has one warp, and scores are compared as integers, whose
order is the same: a warp finds the largest integer in one instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options

ROWS = 4
"""Tokens per program, at most; one per warp."""
LOWEST = tl.constexpr(-(1 << 31))
"""Below every score, and below NaN."""


@triton.jit(do_not_specialize=["num_tokens"])
def _topk_experts_kernel(
    weights_ptr,
    experts_ptr,
    logits_ptr,
    num_tokens,
    stride_logits,
    bias_ptr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    FACTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: ROWS tokens."""
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
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        logits = tl.where(in_e[None, :], logits, float("-inf"))
        grown = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = grown / tl.sum(grown, axis=1)[:, None]
    if BIAS:
        bias = tl.load(bias_ptr + expert, mask=in_e, other=0.0).to(tl.float32)
        left = (scores + bias[None, :]).to(tl.int32, bitcast=True)
        # Negative floats compare in reverse.
        left = left ^ ((left >> 31) & 0x7FFFFFFF)
    else:
        left = scores.to(tl.int32, bitcast=True)
    left = tl.where(in_e[None, :], left, LOWEST)
    weights = tl.zeros([ROWS, BLOCK_TOP], tl.float32)
    experts = tl.zeros([ROWS, BLOCK_TOP], tl.int32)
    total = tl.zeros([ROWS], tl.float32)
    for number in tl.static_range(TOP_K):
        highest = tl.max(left, axis=1)
        at = tl.min(tl.where(left == highest[:, None], expert[None, :], BLOCK_E), axis=1)
        if BIAS:
            best = tl.sum(tl.where(expert[None, :] == at[:, None], scores, 0.0), axis=1)
        else:
            best = highest.to(tl.float32, bitcast=True)
        weights = tl.where((place == number)[None, :], best[:, None], weights)
        experts = tl.where((place == number)[None, :], at[:, None], experts)
        total += best
        left = tl.where(expert[None, :] == at[:, None], LOWEST, left)
    if RENORMALIZE:
        if SIGMOID:
            total += 1e-20
        weights /= total[:, None]
    if FACTOR != 1.0:
        weights *= FACTOR
    target = token[:, None] * TOP_K + place[None, :]
    mask = in_t[:, None] & (place < TOP_K)[None, :]
    tl.store(weights_ptr + target, weights, mask=mask)
    tl.store(experts_ptr + target, experts, mask=mask)


def topk_experts(
    logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool,
    sigmoid: bool = False,
    bias: torch.Tensor | None = None,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: [num_tokens, num_experts], last stride 1; bias: [num_experts], added to scores for
    the choice alone → weights [num_tokens, top_k] float32 and experts [num_tokens, top_k] int32, by
    descending score, then ascending number.

    `sigmoid`: scores are of each logit, not a softmax over all. `factor`: of all weights, after
    `renormalize`. A row's experts are different and valid for any logits, NaN included.
    """
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    if num_tokens == 0:
        return weights, experts
    rows = ROWS if num_tokens > 1 else 1
    options = pdl_options(logits.device)
    launch(_topk_experts_kernel, (triton.cdiv(num_tokens, rows),))(
        weights,
        experts,
        logits,
        num_tokens,
        logits.stride(0),
        logits if bias is None else bias,
        E=num_experts,
        TOP_K=top_k,
        SIGMOID=sigmoid,
        BIAS=bias is not None,
        RENORMALIZE=renormalize,
        FACTOR=factor,
        ROWS=rows,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_TOP=triton.next_power_of_2(top_k),
        PDL=bool(options),
        num_warps=rows,
        **options,
    )
    return weights, experts
