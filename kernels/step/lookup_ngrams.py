"""Finds an earlier occurrence of each row's last tokens, and copies the tokens that followed.

One program per row reads its tokens once for each of the `MOST` looked-up ones; those reads hit the
cache but the first. Memory: 4 bytes per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch

TOKENS = 2048


@triton.jit
def _lookup_kernel(
    drafts_ptr,
    counts_ptr,
    history_ptr,
    slots_ptr,
    lengths_ptr,
    stride_history,
    num_drafts,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    DRAFTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    tokens = history_ptr + tl.load(slots_ptr + row) * stride_history
    last = length - 1
    # The longest match, then the first: the matched tokens, and how far it is to the end.
    best = tl.zeros([], dtype=tl.int64)
    for start in range(0, last, TOKENS):
        position = start + tl.arange(0, TOKENS)
        alike = position < last
        matched = tl.zeros([TOKENS], dtype=tl.int32)
        for back in tl.static_range(MOST):
            inside = alike & (position >= back)
            before = tl.load(tokens + position - back, mask=inside, other=0)
            wanted = tl.load(tokens + tl.maximum(last - back, 0))
            alike = inside & (before == wanted)
            matched += alike.to(tl.int32)
        key = matched.to(tl.int64) * (1 << 32) + (last - position).to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(matched >= LEAST, key, 0), axis=0))
    distance = (best & 0x7FFFFFFF).to(tl.int32)
    count = tl.minimum(distance, num_drafts)
    tl.store(counts_ptr + row, count)
    draft = tl.arange(0, DRAFTS)
    followers = tl.load(tokens + last - distance + 1 + draft, mask=draft < count, other=0)
    tl.store(drafts_ptr + row * num_drafts + draft, followers, mask=draft < num_drafts)


def lookup_ngrams(
    history: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    least: int,
    most: int,
    num_drafts: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what followed the last tokens of each row at their longest, then first, occurrence.

    history: [slots, positions] int32, last stride 1; slots: [R] int64; lengths: [R] int64, at least
    1: row r has the tokens history[slots[r], :lengths[r]]; least, most: of the last tokens, how
    many must have occurred, and how many are compared → [R, num_drafts] int32, padded with 0, and
    their numbers, [R] int32
    """
    num_rows = len(slots)
    drafts = torch.empty((num_rows, num_drafts), dtype=torch.int32, device=history.device)
    counts = torch.empty(num_rows, dtype=torch.int32, device=history.device)
    if num_rows:
        launch(_lookup_kernel, (num_rows,))(
            drafts, counts, history, slots, lengths, history.stride(0), num_drafts,
            LEAST=least, MOST=most, DRAFTS=triton.next_power_of_2(num_drafts), TOKENS=TOKENS,
            num_warps=8,
        )  # fmt: skip
    return drafts, counts
