"""Who goes to which expert, listed by expert, without asking the host.

A slot is one of a token's choices: number token * top_k + place. An expert is chosen at most once
by a token, so it is tokens that are counted, and a list has room for all of them: where it begins
depends on nothing that was chosen. Memory: each of num_experts programs reads all choices (4 bytes
a slot, from the L2 cache); 4 bytes a slot are written.
"""

# Triton kernels take no annotations that mypy could check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launching import gdc_launch_dependents, gdc_wait, pdl_options
from .rehearsal import launch

LARGEST_BLOCK = 1024
"""Tokens at a time"""


@triton.jit(do_not_specialize=["num_tokens"])
def _expert_slots_kernel(
    lists_ptr,
    counts_ptr,
    experts_ptr,
    num_tokens,
    TOP_K: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program an expert."""
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK_TOP)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    list_ptr = lists_ptr + expert.to(tl.int64) * num_tokens
    count = 0
    for start in range(0, num_tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        mask = (token < num_tokens)[:, None] & (place < TOP_K)[None, :]
        slot = token[:, None] * TOP_K + place[None, :]
        chosen = tl.load(experts_ptr + slot, mask=mask, other=-1)
        # Of several (a broken router's) the last one, so that lists never overflow.
        found = tl.max(tl.where(chosen == expert, place[None, :], -1), axis=1)
        here = (found >= 0).to(tl.int32)
        at = count + tl.cumsum(here, axis=0) - here
        tl.store(list_ptr + at, token * TOP_K + found, mask=found >= 0)
        count += tl.sum(here, axis=0)
    tl.store(counts_ptr + expert, count)


def expert_slots(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """experts: [num_tokens, top_k] int32, contiguous → slots [num_experts, num_tokens] int32, each
    expert's in ascending order, and how many they are, [num_experts] int32; what is behind them in
    a row is free."""
    num_tokens, top_k = experts.shape
    slots = torch.empty((num_experts, num_tokens), dtype=torch.int32, device=experts.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    block_top = triton.next_power_of_2(top_k)
    block = min(max(triton.next_power_of_2(num_tokens), 32), LARGEST_BLOCK)
    options = pdl_options(experts.device)
    launch(_expert_slots_kernel, (num_experts,))(
        slots,
        counts,
        experts,
        num_tokens,
        TOP_K=top_k,
        BLOCK_TOP=block_top,
        BLOCK=block,
        PDL=bool(options),
        num_warps=min(max(block * block_top // 512, 1), 8),
        **options,
    )
    return slots, counts
