"""Chooses the experts of each token: the top_k largest scores, by softmax or sigmoid, plus bias;
of all, or of those in the best groups.

Memory: reads num_experts logits per token and writes 8 bytes per choice. Bound by the latency of
top_k (and a few for each group) sequential reductions. So each row has one warp, and scores are
compared as integers of the same order: a warp finds the largest in one instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import empty_indices, launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options

ROWS = 4
"""Tokens per program, at most; one per warp."""
LOWEST = tl.constexpr(-(1 << 31))
"""Below every score, and below NaN."""
OUTSIDE = tl.constexpr(-0x7F800001)
"""-inf, as an integer in the order of scores."""


@triton.jit
def _ordered(x):
    """float32 → int32 in the same order"""
    bits = x.to(tl.int32, bitcast=True)
    # Negative floats compare in reverse.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _in_best_groups(
    left,
    choice,
    expert,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Set scores outside a token's best groups, those with the largest sum of their BEST largest
    scores, to -inf. left: [ROWS, BLOCK_E] choice as ordered integers."""
    group = tl.arange(0, BLOCK_G)
    totals = tl.full([ROWS, BLOCK_G], LOWEST, tl.int32)
    for number in tl.static_range(GROUPS):
        own = tl.where((expert // SIZE == number)[None, :], left, LOWEST)
        total = tl.zeros([ROWS], tl.float32)
        for _ in tl.static_range(BEST):
            highest = tl.max(own, axis=1)
            at = tl.min(tl.where(own == highest[:, None], expert[None, :], BLOCK_E), axis=1)
            total += tl.sum(tl.where(expert[None, :] == at[:, None], choice, 0.0), axis=1)
            own = tl.where(expert[None, :] == at[:, None], LOWEST, own)
        totals = tl.where((group == number)[None, :], _ordered(total)[:, None], totals)
    kept = tl.zeros([ROWS, BLOCK_E], tl.int1)
    for _ in tl.static_range(TOP_GROUPS):
        highest = tl.max(totals, axis=1)
        at = tl.min(tl.where(totals == highest[:, None], group[None, :], BLOCK_G), axis=1)
        kept = kept | ((expert // SIZE)[None, :] == at[:, None])
        totals = tl.where(group[None, :] == at[:, None], LOWEST, totals)
    return tl.where(kept | (left == LOWEST), left, OUTSIDE)


@triton.jit(do_not_specialize=["num_tokens", "first"])
def _topk_experts_kernel(
    weights_ptr,
    experts_ptr,
    logits_ptr,
    num_tokens,
    stride_logits,
    bias_ptr,
    first,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    PDL: tl.constexpr,
):
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
        choice = scores + bias[None, :]
        left = _ordered(choice)
    else:
        choice = scores
        left = scores.to(tl.int32, bitcast=True)
    left = tl.where(in_e[None, :], left, LOWEST)
    if GROUPS > 1:
        left = _in_best_groups(
            left, choice, expert, GROUPS, TOP_GROUPS, E // GROUPS,
            min(2, E // GROUPS) if BIAS else 1, BLOCK_G, ROWS, BLOCK_E,
        )  # fmt: skip
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
    tl.store(experts_ptr + target, experts - first, mask=mask)


def topk_experts(
    logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool,
    sigmoid: bool = False,
    bias: torch.Tensor | None = None,
    factor: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    first: int = 0,
    rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits: [num_tokens, num_experts], last stride 1; bias: [num_experts], added to scores for
    the choice alone → weights [num_tokens, top_k] float32 and experts [num_tokens, top_k] int32, by
    descending score, then ascending number.

    `sigmoid`: scores are of each logit, not a softmax over all. `factor`: of all weights, after
    `renormalize`. `groups`: of equal size, in order; experts are chosen from the `top_groups` with
    the largest sum of their two best scores, or without a bias, with the best score. `first`: the
    expert from which they are counted. `rows`: tokens per program; None: by their number. A row's
    experts are different and valid for any logits, NaN included; in a `Precompiler` they are valid.
    """
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    experts = empty_indices(num_tokens, top_k, device=logits.device)
    if num_tokens == 0:
        return weights, experts
    rows = rows or (ROWS if num_tokens > 1 else 1)
    options = pdl_options(logits.device)
    launch(_topk_experts_kernel, (triton.cdiv(num_tokens, rows),))(
        weights,
        experts,
        logits,
        num_tokens,
        logits.stride(0),
        logits if bias is None else bias,
        first,
        E=num_experts,
        TOP_K=top_k,
        SIGMOID=sigmoid,
        BIAS=bias is not None,
        RENORMALIZE=renormalize,
        FACTOR=factor,
        GROUPS=groups,
        TOP_GROUPS=top_groups,
        BLOCK_G=triton.next_power_of_2(groups),
        ROWS=rows,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_TOP=triton.next_power_of_2(top_k),
        PDL=bool(options),
        num_warps=rows,
        **options,
    )
    return weights, experts
