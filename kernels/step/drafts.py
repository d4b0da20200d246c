"""Speculative decoding: which drafts of each row were chosen, and where new ones go. One launch
each."""

from __future__ import annotations

from typing import TypeAlias

import torch
import triton
import triton.language as tl

from ..launch import launch

Tables: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens [slots, positions] int32, last stride 1; lengths [slots] int32, one less than known
tokens; numbers of proposed drafts [slots] int32: `DraftTables` of `core.nn.step_operations`."""


@triton.jit
def _leading(good, order, BLOCK: tl.constexpr):
    return tl.min(tl.where(good, BLOCK, order), axis=0)


@triton.jit
def _verify_kernel(
    verdicts_ptr,
    chosen_ptr,
    drafts_ptr,
    starts_ptr,
    slots_ptr,
    lengths_ptr,
    num_proposed_ptr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - start - 1
    slot = tl.load(slots_ptr + row)
    proposed = tl.minimum(count, tl.load(num_proposed_ptr + slot))
    order = tl.arange(0, BLOCK)
    inside = order < proposed
    chosen = tl.load(chosen_ptr + start + order, mask=inside, other=-1)
    drafts = tl.load(drafts_ptr + start + order, mask=inside, other=-2)
    accepted = tl.minimum(_leading(inside & (chosen == drafts), order, BLOCK), proposed)
    tl.store(lengths_ptr + slot, tl.load(lengths_ptr + slot) + accepted - count)
    tl.store(verdicts_ptr + 2 * row, accepted)
    tl.store(verdicts_ptr + 2 * row + 1, proposed)


def verify_drafts(
    chosen: torch.Tensor,
    drafts: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    tables: Tables,
    most: int,
) -> torch.Tensor:
    """Accept the drafts of S rows up to the first that was not chosen.

    chosen, drafts: [L] int32, by position; starts: [S + 1] int32, row s has the positions starts[s]
    .. starts[s + 1], the last without a draft; slots: [S] int64; tables: of the slots; lengths
    are reduced by the rejected drafts; most: drafts of a row at most
    → [S, 2] int32: accepted drafts, and those that were proposed
    """
    num_rows, (_, lengths, num_proposed) = len(slots), tables
    verdicts = torch.empty((num_rows, 2), dtype=torch.int32, device=chosen.device)
    if num_rows:
        launch(_verify_kernel, (num_rows,))(
            verdicts, chosen, drafts, starts, slots, lengths, num_proposed,
            BLOCK=triton.next_power_of_2(most), num_warps=1,
        )  # fmt: skip
    return verdicts


@triton.jit
def _keep_kernel(
    kept_ptr,
    token_ids_ptr,
    counts_ptr,
    slots_ptr,
    history_ptr,
    lengths_ptr,
    num_proposed_ptr,
    stride_ids,
    stride_history,
    num_drafts,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    order = tl.arange(0, BLOCK)
    inside = order < num_drafts
    token_ids = tl.load(token_ids_ptr + row * stride_ids + order, mask=inside, other=-1)
    valid = (order < tl.load(counts_ptr + row)) & (token_ids >= 0) & (token_ids < vocab_size)
    kept = tl.minimum(_leading(valid, order, BLOCK), num_drafts)
    place = history_ptr + slot * stride_history + tl.load(lengths_ptr + slot) + 1 + order
    tl.store(place, tl.where(order < kept, token_ids, 0).to(tl.int32), mask=inside)
    tl.store(num_proposed_ptr + slot, kept)
    tl.store(kept_ptr + row, kept)


def keep_drafts(
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    tables: Tables,
    vocab_size: int,
) -> torch.Tensor:
    """Write the drafts of R rows after the known tokens of their slots.

    token_ids: [R, K] int32 or int64, last stride 1; counts: [R] int32 or int64, the first so many
    are drafts, up to the first that is not in the vocabulary; slots: [R] int64; tables: of the
    slots; tokens and numbers of drafts are written → [R] int32, the number of each; 0 is in the
    place of the others
    """
    num_rows, num_drafts = token_ids.shape
    history, lengths, num_proposed = tables
    kept = torch.empty(num_rows, dtype=torch.int32, device=token_ids.device)
    if num_rows:
        launch(_keep_kernel, (num_rows,))(
            kept, token_ids, counts, slots, history, lengths, num_proposed, token_ids.stride(0),
            history.stride(0), num_drafts, vocab_size, BLOCK=triton.next_power_of_2(num_drafts),
            num_warps=1,
        )  # fmt: skip
    return kept
