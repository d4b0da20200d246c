"""One token per row: the largest logit / temperature + Gumbel noise, in one pass over the logits.

For rows that need nothing else; `sample_tokens` serves the others. Memory: num_rows * vocab_size
logits, read once; the parts' winners are a few kilobytes. About 30 instructions per logit if a row
draws: bound by them. So logarithms are the processor's base-2 instruction (its error changes a
score by about 1e-6), and the hash of a token, the same for all rows, is computed once for several
rows. A greedy row takes 5 instructions per logit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from .gumbel_noise import LOG2E, drawn_scores, largest, row_keys, token_hashes
from .layout import INVERSE_TEMPERATURE, NOISE, float_of

PART = 2048
"""Logits of a row per program."""
SHARING = 4
"""Rows per program if there are many."""


@triton.jit(
    do_not_specialize=["num_rows", "sharing"],
    do_not_specialize_on_alignment=["slots_ptr", "lengths_ptr"],
)
def _part_kernel(
    best_ptr,
    token_ptr,
    logits_ptr,
    settings_ptr,
    slots_ptr,
    lengths_ptr,
    stride_logits,
    stride_settings,
    num_rows,
    vocab_size,
    num_parts,
    sharing,
    PART_SIZE: tl.constexpr,
):
    """One program: one part of several rows; stores the parts' winners, +inf if a logit is NaN."""
    part = tl.program_id(0)
    first = tl.program_id(1) * sharing
    token = part * PART_SIZE + tl.arange(0, PART_SIZE)
    inside = token < vocab_size
    hashes = token_hashes(token)
    for row in range(first, tl.minimum(first + sharing, num_rows)):
        row64 = first.to(tl.int64) + (row - first)
        settings = settings_ptr + tl.load(slots_ptr + row64) * stride_settings
        place = logits_ptr + row64 * stride_logits + token
        logits = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32)
        inverse_temperature = float_of(settings, INVERSE_TEMPERATURE)
        if tl.load(settings + NOISE) != 0:
            position = tl.load(lengths_ptr + row64).to(tl.int32)
            key_0, key_1, key_2 = row_keys(settings, position)
            factor = inverse_temperature * LOG2E
            logits = drawn_scores(logits, factor, hashes, key_0, key_1, key_2)
        else:
            logits = logits * inverse_temperature
        best = largest(logits)
        winner = tl.min(tl.where(logits == best, token, vocab_size), axis=0)
        tl.store(best_ptr + row64 * num_parts + part, best)
        tl.store(token_ptr + row64 * num_parts + part, winner)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "lengths_ptr"])
def _row_kernel(
    chosen_ptr,
    history_ptr,
    slots_ptr,
    lengths_ptr,
    best_ptr,
    token_ptr,
    stride_history,
    num_parts,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """One program per row: the winner of its parts, the lowest id among equal scores."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    inside = part < num_parts
    best = tl.load(best_ptr + row * num_parts + part, mask=inside, other=-float("inf"))
    token = tl.load(token_ptr + row * num_parts + part, mask=inside, other=vocab_size)
    highest = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == highest, token, vocab_size), axis=0)
    bad = (highest == float("inf")) | (highest == -float("inf"))
    place = history_ptr + tl.load(slots_ptr + row) * stride_history + tl.load(lengths_ptr + row)
    tl.store(place, tl.where(bad, 0, winner))
    tl.store(chosen_ptr + row, tl.where(bad, -1, winner))


def sample_gumbel(
    logits: torch.Tensor,
    settings: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    token_history: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    """Choose a token for each row, and write it to `chosen` and to `token_history`.

    logits: [num_rows, vocab_size], any float type, last stride 1; settings: [slots, columns] int32,
    one row per slot (layout.py), of which only temperature and seed are read; slots: [num_rows]
    int64; lengths: [num_rows] int64, tokens before the new one; token_history: [slots, positions]
    int32; chosen: [num_rows] int32: -1 if NaN or an infinity won (the history then gets 0).
    """
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    num_parts = triton.cdiv(vocab_size, PART)
    best = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    token = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    sharing = SHARING if num_rows >= 2 * SHARING else 1
    launch(_part_kernel, (num_parts, triton.cdiv(num_rows, sharing)))(
        best,
        token,
        logits,
        settings,
        slots,
        lengths,
        logits.stride(0),
        settings.stride(0),
        num_rows,
        vocab_size,
        num_parts,
        sharing,
        PART_SIZE=PART,
        num_warps=4,
        enable_fp_fusion=False,
    )
    launch(_row_kernel, (num_rows,))(
        chosen,
        token_history,
        slots,
        lengths,
        best,
        token,
        token_history.stride(0),
        num_parts,
        vocab_size,
        BLOCK=triton.next_power_of_2(num_parts),
        num_warps=1,
    )
