"""Lists the slots of each expert on the device.

A slot is one of a token's choices: number token * top_k + rank. A token chooses an expert at most
once, so each expert's list has room for all tokens and begins at a fixed offset. Memory: each of
num_experts programs reads all choices from the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options

LARGEST_BLOCK = 1024


@triton.jit(do_not_specialize=["num_tokens"])
def _sort_tokens_kernel(
    lists_ptr,
    counts_ptr,
    experts_ptr,
    num_tokens,
    TOP_K: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
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
        # If an invalid router output has it twice, keep the last one, so that lists never overflow.
        choice = tl.max(tl.where(chosen == expert, place[None, :], -1), axis=1)
        hits = (choice >= 0).to(tl.int32)
        offsets = count + tl.cumsum(hits, axis=0) - hits
        tl.store(list_ptr + offsets, token * TOP_K + choice, mask=choice >= 0)
        count += tl.sum(hits, axis=0)
    tl.store(counts_ptr + expert, count)


def sort_tokens(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """experts: [num_tokens, top_k] int32, contiguous → slots [num_experts, num_tokens] int32, each
    expert's in ascending order, and their counts, [num_experts] int32; the rest of each row is not
    written. Slots of other numbers (another rank's experts) are in no list."""
    num_tokens, top_k = experts.shape
    slots = torch.empty((num_experts, num_tokens), dtype=torch.int32, device=experts.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    block_top = triton.next_power_of_2(top_k)
    block = min(max(triton.next_power_of_2(num_tokens), 32), LARGEST_BLOCK)
    options = pdl_options(experts.device)
    launch(_sort_tokens_kernel, (num_experts,))(
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
