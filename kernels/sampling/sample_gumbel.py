"""One token per row: the largest logit / temperature + Gumbel noise, in one pass over the logits.

For rows that need nothing else; `sample_tokens` serves the others. Memory: num_rows * vocab_size
logits, read once; the parts' winners are a few kilobytes. About 30 instructions per sampled logit
are the bound. So logarithms use the processor's base-2 instruction (error about 1e-6), and a
token's hash is computed once for several rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from ..pdl import gdc_launch_dependents, gdc_wait, pdl_options
from .gumbel_noise import LOG2E, drawn_scores, largest, row_keys, token_hashes
from .layout import INVERSE_TEMPERATURE, NOISE, float_of

PART = 2048
SHARING = 4
"""Rows per program, if there are many."""
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
"""More than any token id."""


@triton.jit(
    do_not_specialize=["num_rows", "sharing", "first_token"],
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
    stride_best,
    num_rows,
    num_tokens,
    first_token,
    sharing,
    PART_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one part of several rows; stores the parts' winners, +inf if a logit is NaN."""
    part = tl.program_id(0)
    first = tl.program_id(1) * sharing
    column = part * PART_SIZE + tl.arange(0, PART_SIZE)
    inside = column < num_tokens
    token = first_token + column
    hashes = token_hashes(token)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for row in range(first, tl.minimum(first + sharing, num_rows)):
        row64 = first.to(tl.int64) + (row - first)
        settings = settings_ptr + tl.load(slots_ptr + row64) * stride_settings
        place = logits_ptr + row64 * stride_logits + column
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
        winner = tl.min(tl.where(logits == best, token, first_token + num_tokens), axis=0)
        tl.store(best_ptr + row64 * stride_best + part, best)
        tl.store(token_ptr + row64 * stride_best + part, winner)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "lengths_ptr"])
def _row_kernel(
    chosen_ptr,
    history_ptr,
    slots_ptr,
    lengths_ptr,
    best_ptr,
    token_ptr,
    stride_history,
    stride_best,
    num_parts,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    inside = part < num_parts
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    best = tl.load(best_ptr + row * stride_best + part, mask=inside, other=-float("inf"))
    token = tl.load(token_ptr + row * stride_best + part, mask=inside, other=NO_TOKEN)
    highest = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == highest, token, NO_TOKEN), axis=0)
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
    parts = best_of_parts(logits, settings, slots, lengths)
    choose_best(parts[:, 0].view(torch.float32), parts[:, 1], slots, lengths, token_history, chosen)


def best_of_parts(
    logits: torch.Tensor,
    settings: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    first_token: int = 0,
) -> torch.Tensor:
    """Find the best token of each part of each row. Arguments as for `sample_gumbel`; `logits` are
    those of the tokens from `first_token` on.

    → [num_rows, 2, parts] int32: the bits of the best scores, float32, and their tokens; parts
    without tokens have -inf.
    """
    num_rows, num_tokens = logits.shape
    num_parts = max(1, triton.cdiv(num_tokens, PART))
    best = torch.empty((num_rows, 2, num_parts), dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return best
    sharing = SHARING if num_rows >= 2 * SHARING else 1
    options = pdl_options(logits.device)
    launch(_part_kernel, (num_parts, triton.cdiv(num_rows, sharing)))(
        best.view(torch.float32),
        best[:, 1],
        logits,
        settings,
        slots,
        lengths,
        logits.stride(0),
        settings.stride(0),
        best.stride(0),
        num_rows,
        num_tokens,
        first_token,
        sharing,
        PART_SIZE=PART,
        PDL=bool(options),
        num_warps=4,
        enable_fp_fusion=False,
        **options,
    )
    return best


def choose_best(
    best: torch.Tensor,
    token: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    token_history: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    """Choose among the winners of parts, [num_rows, parts] float32 and int32, of the same strides
    and the last stride 1; other arguments as for `sample_gumbel`."""
    num_rows, num_parts = best.shape
    if num_rows == 0:
        return
    options = pdl_options(best.device)
    launch(_row_kernel, (num_rows,))(
        chosen,
        token_history,
        slots,
        lengths,
        best,
        token,
        token_history.stride(0),
        best.stride(0),
        num_parts,
        BLOCK=triton.next_power_of_2(num_parts),
        PDL=bool(options),
        num_warps=1,
        **options,
    )
