"""Tables of the places where the same tokens stood, and the drafts that they give. In torch; the
kernels do the same.

A text is a flat array. For each place in it, four cells are written: those of the last 1, 2, 4 and
8 tokens up to there, found by their hash. A bucket has `WAYS` cells, of which a place takes the one
of its remainder, and a later place replaces an earlier one. So a look-up finds up to 32 places at
once, the longest match nearly always among them. The newest place is written after it was looked
up: it would replace the one that is a multiple of `WAYS` tokens before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

SIZES = (1, 2, 4, 8)
"""Numbers of last tokens by which places are found."""
WAYS = 8
"""Cells of a bucket."""
MASK = 0x7FFFFFFF
FACTOR, MIX = 1000003, 741103597
NEVER = -2
"""A token that no text has."""


class Text(NamedTuple):
    """Tokens, and the places found by their last ones."""

    tokens: torch.Tensor
    """[N] int32; -1 ends an output"""
    cells: torch.Tensor
    """[M] int32: a place and 1; 0: none"""
    owners: torch.Tensor | None = None
    """[N] int64: whose token it is; None: each row has a part of its own."""


class Rows(NamedTuple):
    """The part of a text that each of R rows has. Place p is the token `base + p % size`."""

    base: torch.Tensor
    """[R] int64"""
    size: int
    cells: torch.Tensor
    """[R] int64: its first cell."""
    num_buckets: int
    """A power of 2."""
    owners: torch.Tensor
    """[R] int64"""
    first: torch.Tensor
    """[R] int64: its first place."""
    end: torch.Tensor
    """[R] int64: the place behind its last."""

    def tokens(self, text: Text, places: torch.Tensor) -> torch.Tensor:
        """Return the tokens at places [R, ...], or `NEVER` outside of the row's part."""
        shape = (-1, *[1] * (places.dim() - 1))
        inside = (places >= self.first.view(shape)) & (places < self.end.view(shape))
        index = self.base.view(shape) + places.clamp(min=0) % self.size
        return torch.where(inside, text.tokens[index], NEVER)

    def buckets(self, lasts: torch.Tensor, size: int) -> torch.Tensor:
        """Return the first cells of the bucket of the last tokens, [R, size or more, ...], the
        newest first → [R, ...]"""
        shape = (-1, *[1] * (lasts.dim() - 2))
        state = ((self.owners + size) & MASK).view(shape)
        for back in reversed(range(size)):
            state = (state * FACTOR + lasts[:, back] + 1) & MASK
        state = ((state ^ (state >> 15)) * MIX) & MASK
        bucket = (state ^ (state >> 12)) & (self.num_buckets - 1)
        return self.cells.view(shape) + bucket * WAYS


class Rule(NamedTuple):
    """How drafts follow from matches: `SuffixOptions`."""

    depth: int
    factor: float
    least: float
    num_drafts: int

    @property
    def best_length(self) -> int:
        """The length of a match that has most drafts: of a longer one, the depth leaves fewer."""

        def budget(length: int) -> int:
            return min(int(length * self.factor), self.num_drafts, self.depth - length)

        return max(range(1, self.depth), key=budget)


def note_places(text: Text, rows: Rows, most: int) -> None:
    """Write the last `most` places of each row into the cells."""
    device = text.tokens.device
    places = rows.end[:, None] - most + torch.arange(most, device=device)
    back = torch.arange(SIZES[-1], device=device)
    lasts = rows.tokens(text, places[:, None] - back[:, None])
    known = (lasts >= 0).long().cumprod(dim=1).bool()
    for size in SIZES:
        cells = rows.buckets(lasts, size) + places.clamp(min=0) % WAYS
        values = torch.where(known[:, size - 1], places + 1, 0).int()
        # The latest place wins in whatever order they are written, so that ranks agree.
        text.cells.scatter_reduce_(0, cells.view(-1), values.view(-1), "amax")


def append(
    text: Text, tokens: torch.Tensor, begin: int, length: torch.Tensor, owner: torch.Tensor
) -> None:
    """Write the first `length` [1] of these tokens [n] from place `begin` on, and an end."""
    assert text.owners is not None
    order = torch.arange(len(tokens) + 1, device=tokens.device)
    index = (begin + order) % len(text.tokens)
    kept = torch.where(order[:-1] < length, tokens, -1)
    text.tokens[index] = torch.cat((kept, kept.new_full((1,), -1)))
    text.owners[index] = owner


def drafts(
    own: Text, own_rows: Rows, shared: Text, others: Sequence[Rows], rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's drafts, [R, K] int32, and their numbers, [R] int32. others: parts of the
    shared text, each of which must be better than those before."""
    device = own.tokens.device
    back = torch.arange(max(rule.depth, SIZES[-1]), device=device)
    lasts = own_rows.tokens(own, own_rows.end[:, None] - 1 - back)
    best = _best(own, own_rows, lasts, rule)
    for rows in others:
        other = _best(shared, rows, lasts, rule)
        better = other[0] > best[0]
        best = tuple(
            torch.where(better.view(-1, *[1] * (a.dim() - 1)), a, b)
            for a, b in zip(other, best, strict=True)
        )
    return best[1], best[2]


def _best(text: Text, rows: Rows, lasts: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, ...]:
    """Return the scores, drafts and numbers of drafts of each row from one text."""
    matched, ahead = _matches(text, rows, lasts, rule)
    levels, each = matched[:, :, None], matched[:, None, :]
    active = (each >= levels) & (each > 0) & (levels > 0)
    # A match of m tokens is one of fewer, too. Down to the next shorter match, the same places
    # vote, and the length with most drafts is best.
    shorter = torch.where(each < levels, each, 0).amax(dim=2)
    length = torch.minimum((shorter + 1).clamp(min=rule.best_length), matched)
    budget = (length * rule.factor).long().clamp(max=rule.num_drafts)
    budget = torch.minimum(budget, rule.depth - length)
    shape = matched.shape
    product = torch.ones(shape, device=matched.device)
    score, count = torch.zeros_like(product), torch.zeros_like(matched)
    alive = matched > 0
    drafts = torch.zeros((*shape, rule.num_drafts), dtype=torch.int32, device=matched.device)
    for number in range(rule.num_drafts):
        tokens = ahead[:, :, number]
        active = active & (tokens >= 0)[:, None, :]
        alike = (tokens[:, :, None] == tokens[:, None, :]).float()
        votes = torch.where(active, torch.bmm(active.float(), alike), 0)
        most, total = votes.amax(dim=2), active.sum(dim=2)
        winners = torch.where(active & (votes == most[:, :, None]), tokens[:, None, :], MASK)
        token = winners.amin(dim=2)
        product = product * (most / total.clamp(min=1))
        alive = alive & (total > 0) & (number < budget) & (product >= rule.least)
        drafts[:, :, number] = torch.where(alive, token, 0).int()
        score, count = score + torch.where(alive, product, 0), count + alive
        active = active & (tokens[:, None, :] == token[:, :, None])
    best = score.amax(dim=1)
    place = torch.where(score == best[:, None], matched, -1).argmax(dim=1)[:, None]
    count = count.gather(1, place).squeeze(1).int()
    return best, drafts.gather(1, place[:, :, None].expand(-1, 1, rule.num_drafts))[:, 0], count


def _matches(
    text: Text, rows: Rows, lasts: torch.Tensor, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many last tokens match at each place found, [R, C], 0 for none, and the tokens
    that follow there, [R, C, K], -1 where none does."""
    device = lasts.device
    ways = torch.arange(WAYS, device=device)
    cells = [rows.buckets(lasts, size)[:, None] + ways for size in SIZES]
    places = text.cells[torch.cat(cells, dim=1)].long() - 1
    # A match ends before the last token, which is the last of the own text.
    alike = (places >= 0) & (places < rows.end[:, None] - 1)
    if text.owners is not None:
        index = rows.base[:, None] + places.clamp(min=0) % rows.size
        alike &= text.owners[index] == rows.owners[:, None]
    matched = torch.zeros_like(places)
    for back in range(rule.depth - 1):
        wanted = lasts[:, back, None]
        alike = alike & (wanted >= 0) & (rows.tokens(text, places - back) == wanted)
        matched += alike
    least = torch.tensor([min(size, rule.depth - 1) for size in SIZES], device=device)
    found = matched >= least.repeat_interleave(WAYS)
    number = torch.arange(places.shape[1], device=device)
    again = (places[:, :, None] == places[:, None, :]) & (number < number[:, None])
    found = found & ~(again & found[:, None, :]).any(dim=2)
    ahead = rows.tokens(text, places[:, :, None] + 1 + torch.arange(rule.num_drafts, device=device))
    return matched * found, torch.where((ahead >= 0).long().cumprod(dim=2) > 0, ahead, -1)
