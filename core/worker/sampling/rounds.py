"""Sampling of drafted rows whose tokens depend on their output, such as with penalties.

Place by place: the first place of every row, then the second of those whose draft was sampled, and
so on. So each call changes the tables of a slot (counts, barred tokens) as a step of one token
does, and never by a token that is not kept. Rows that have ended use the padding slot meanwhile:
which have is known to the device alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..packing import PackedUpload
from .logprobs import Logprobs
from .masks import TokenMask
from .rejection import DrawnDrafts
from .sampler import Sampler

FIELDS = dataclasses.fields(Logprobs)


class DraftPlaces(NamedTuple):
    """The drafts of S sampling rows with L positions."""

    counts: Sequence[int]
    """[S] Drafts; a row has one position more, after those of the row before."""
    drafts: torch.Tensor
    """[L] int32: draft at each position's token; undefined at a row's last position."""
    proposed: torch.Tensor
    """[S] int: the first so many of a row's drafts may be accepted."""
    in_turn: Sequence[bool]
    """[S] Whether a row's tokens depend on its output."""
    drawn: DrawnDrafts | None = None
    """The drafts, if they are accepted by what they were drawn from."""


def sample_in_rounds(
    sampler: Sampler,
    logits: torch.Tensor,
    slots: torch.Tensor,
    slots_host: Sequence[int],
    lengths: torch.Tensor,
    mask: TokenMask | None,
    places: DraftPlaces,
) -> tuple[torch.Tensor, Logprobs | None]:
    """As `Sampler.sample_eagerly`, for L positions with drafts.

    → chosen [L] int32, undefined after a row's first token that is not its draft;
    log-probabilities, if requested
    """
    counts = np.asarray(places.counts)
    firsts = np.cumsum(counts + 1) - counts - 1
    in_turn = np.asarray(places.in_turn, dtype=bool)
    later = np.zeros(len(slots_host), dtype=bool)
    rounds: list[tuple[np.ndarray, np.ndarray]] = []
    for place in range(1, 1 + int(counts[in_turn].max(initial=0))):
        of = np.flatnonzero(in_turn & (counts >= place))
        rounds.append((firsts[of] + place, of))
        later[firsts[of] + place] = True
    upload = PackedUpload(logits.device)
    first = np.flatnonzero(~later)
    for array in (first, *(array for each in rounds for array in each)):
        upload.add(array.astype(np.int64))
    sent = upload.send()
    chosen = torch.zeros(len(slots_host), dtype=torch.int32, device=logits.device)
    scores: list[tuple[torch.Tensor, Logprobs]] = []

    def sample(index: np.ndarray, at: torch.Tensor, used: torch.Tensor) -> None:
        host = [slots_host[position] for position in index]
        part = None if mask is None else mask.part(index)
        drawn = None if places.drawn is None else places.drawn.part(at)
        tokens, logprobs = sampler.sample_eagerly(logits[at], used, host, lengths[at], part, drawn)
        chosen.index_copy_(0, at, tokens)
        if logprobs is not None:  # The next call overwrites them.
            copied = {field.name: getattr(logprobs, field.name).clone() for field in FIELDS}
            scores.append((at, Logprobs(**copied)))

    sample(first, sent[0], slots[sent[0]])
    goes_on = torch.ones(len(counts), dtype=torch.bool, device=logits.device)
    for place, (index, _) in enumerate(rounds, 1):
        at, some = sent[2 * place - 1 : 2 * place + 1]
        accepted = (chosen[at - 1] == places.drafts[at - 1]) & (places.proposed[some] >= place)
        goes_on[some] &= accepted
        sample(index, at, slots[at].masked_fill(~goes_on[some], sampler.padding_slot))
    return chosen, _merged(scores, len(slots_host)) if scores else None


def _merged(scores: list[tuple[torch.Tensor, Logprobs]], count: int) -> Logprobs:
    """Put the log-probabilities of several calls in the order of positions; zeros elsewhere."""
    most = max(part.top_ids.shape[1] for _, part in scores)
    merged = {}
    for field in FIELDS:
        tables = [getattr(part, field.name) for _, part in scores]
        size = (count, most) if tables[0].dim() == 2 else (count,)
        whole = merged[field.name] = tables[0].new_zeros(size)
        for (at, _), table in zip(scores, tables, strict=True):
            if table.dim() == 2:
                table = torch.nn.functional.pad(table, (0, most - table.shape[1]))
            whole.index_copy_(0, at, table)
    return Logprobs(**merged)
