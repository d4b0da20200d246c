"""Suffix decoding: writes the places of new tokens into hash tables, and proposes what most often
followed the last ones. See `plugins/speculators/suffix_tables.py`, whose functions these equal.

`note_places`: one program per row and block of places. `suffix_drafts`: one program per row, of one
warp, as each step of its search depends on the one before.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..launch import launch

PLACES = 256
"""Per program."""
LEVELS: tl.constexpr = tl.constexpr(4)
LONGEST: tl.constexpr = tl.constexpr(8)
"""Of the sizes, which are the powers of 2 up to there: one of each level."""
WAYS: tl.constexpr = tl.constexpr(8)
MASK: tl.constexpr = tl.constexpr(0x7FFFFFFF)
FACTOR: tl.constexpr = tl.constexpr(1000003)
MIX: tl.constexpr = tl.constexpr(741103597)


@triton.jit
def _bucket(state, num_buckets):
    state = ((state ^ (state >> 15)) * MIX) & MASK
    return (state ^ (state >> 12)) & (num_buckets - 1)


@triton.jit
def _note_kernel(
    tokens_ptr,
    cells_ptr,
    base_ptr,
    row_cells_ptr,
    owners_ptr,
    first_ptr,
    end_ptr,
    size,
    num_buckets,
    most,
    PLACES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base, first = tl.load(base_ptr + row), tl.load(first_ptr + row)
    end = tl.load(end_ptr + row)
    owner = tl.load(owners_ptr + row)
    cells = cells_ptr + tl.load(row_cells_ptr + row)
    number = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    place = end - most + number
    noted = (number < most) & (place >= first)
    for level in tl.static_range(LEVELS):
        state = tl.zeros([PLACES], dtype=tl.int64) + ((owner + (1 << level)) & MASK)
        known = noted & (place - ((1 << level) - 1) >= first)
        for step in tl.static_range(1 << level):
            at = place - ((1 << level) - 1 - step)
            token = tl.load(tokens_ptr + base + at % size, mask=known, other=-1).to(tl.int64)
            known = known & (token >= 0)
            state = (state * FACTOR + token + 1) & MASK
        cell = _bucket(state, num_buckets) * WAYS + place % WAYS
        tl.atomic_max(cells + cell, (place + 1).to(tl.int32), mask=known)


@triton.jit
def _best(
    score,
    count,
    drafts,
    own_ptr,
    own_base,
    length,
    tokens_ptr,
    cells_ptr,
    token_owners_ptr,
    base,
    cells,
    owner,
    first,
    end,
    size,
    num_buckets,
    factor,
    least,
    num_drafts,
    best_length,
    OWNED: tl.constexpr,
    DEPTH: tl.constexpr,
    DRAFTS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return score, number and drafts of one text if it is better than what is given."""
    lane = tl.arange(0, LANES)
    order = tl.arange(0, DRAFTS)
    lane_size = 1 << (lane // WAYS)
    state = (owner + lane_size) & MASK
    for step in tl.static_range(LONGEST):
        at = length - LONGEST + step
        token = tl.load(own_ptr + own_base + tl.maximum(at, 0), mask=at >= 0, other=-2)
        after = (state * FACTOR + token.to(tl.int64) + 1) & MASK
        state = tl.where(lane_size >= LONGEST - step, after, state)
    bucket = _bucket(state, num_buckets)
    place = tl.load(cells_ptr + cells + bucket * WAYS + lane % WAYS).to(tl.int64) - 1
    alike = (place >= 0) & (place < end - 1)
    if OWNED:
        whose = tl.load(token_owners_ptr + base + place % size, mask=alike, other=0)
        alike = alike & (whose == owner)
    matched = tl.zeros([LANES], dtype=tl.int32)
    for back in range(DEPTH - 1):
        alike = alike & (place - back >= first) & (length - 1 - back >= 0)
        there = tl.load(tokens_ptr + base + (place - back) % size, mask=alike, other=-1)
        at = tl.maximum(length - 1 - back, 0)
        alike = alike & (there == tl.load(own_ptr + own_base + at)) & (there >= 0)
        matched += alike.to(tl.int32)
    found = matched >= tl.minimum(lane_size, DEPTH - 1)
    # A place that several sizes find counts once.
    twice = (place[:, None] == place[None, :]) & (lane[None, :] < lane[:, None]) & found[None, :]
    found = found & (tl.sum(twice.to(tl.int32), axis=1) == 0)
    matched = tl.where(found, matched, 0)
    best_score = tl.zeros([], dtype=tl.float32)
    best_count = tl.zeros([], dtype=tl.int32)
    best_drafts = tl.zeros([DRAFTS], dtype=tl.int32)
    # From the longest match on, which wins where scores are equal.
    level = tl.max(matched, axis=0)
    while level > 0:
        active = matched >= level
        shorter = tl.max(tl.where(active, 0, matched), axis=0)
        used = tl.minimum(tl.maximum(shorter + 1, best_length), level)
        budget = (used.to(tl.float32) * factor).to(tl.int32)
        budget = tl.minimum(tl.minimum(budget, num_drafts), DEPTH - used)
        product = tl.full([], 1.0, dtype=tl.float32)
        total_score = tl.zeros([], dtype=tl.float32)
        number = tl.zeros([], dtype=tl.int32)
        proposed = tl.zeros([DRAFTS], dtype=tl.int32)
        alive = budget > 0
        while alive:
            ahead = place + 1 + number
            active = active & (ahead < end)
            follower = tl.load(tokens_ptr + base + ahead % size, mask=active, other=-1)
            active = active & (follower >= 0)
            total = tl.sum(active.to(tl.int32), axis=0)
            same = (follower[:, None] == follower[None, :]) & active[None, :]
            votes = tl.where(active, tl.sum(same.to(tl.int32), axis=1), 0)
            most = tl.max(votes, axis=0)
            winner = tl.min(tl.where(active & (votes == most), follower, MASK), axis=0)
            share = most.to(tl.float32) / tl.maximum(total, 1).to(tl.float32)
            product = product * share
            alive = (total > 0) & (product >= least)
            if alive:
                proposed = tl.where(order == number, winner, proposed)
                total_score += product
                number += 1
                active = active & (follower == winner)
                alive = number < budget
        if total_score > best_score:
            best_score = total_score
            best_count = number
            best_drafts = proposed
        level = shorter
    better = best_score > score
    drafts = tl.where(better, best_drafts, drafts)
    return tl.where(better, best_score, score), tl.where(better, best_count, count), drafts


@triton.jit
def _drafts_kernel(
    drafts_ptr,
    counts_ptr,
    own_ptr,
    own_cells_ptr,
    own_base_ptr,
    own_row_cells_ptr,
    own_end_ptr,
    own_size,
    own_buckets,
    shared_ptr,
    shared_cells_ptr,
    token_owners_ptr,
    owners_ptr,
    other_owners_ptr,
    first_ptr,
    end_ptr,
    shared_size,
    shared_buckets,
    factor,
    least,
    num_drafts,
    best_length,
    OTHERS: tl.constexpr,
    DEPTH: tl.constexpr,
    DRAFTS: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base, length = tl.load(own_base_ptr + row), tl.load(own_end_ptr + row)
    zero = tl.zeros([], dtype=tl.int64)
    score = tl.zeros([], dtype=tl.float32)
    count = tl.zeros([], dtype=tl.int32)
    drafts = tl.zeros([DRAFTS], dtype=tl.int32)
    score, count, drafts = _best(
        score, count, drafts, own_ptr, base, length, own_ptr, own_cells_ptr, own_cells_ptr, base,
        tl.load(own_row_cells_ptr + row), zero, zero, length, own_size, own_buckets,
        factor, least, num_drafts, best_length,
        OWNED=False, DEPTH=DEPTH, DRAFTS=DRAFTS, LANES=LANES,
    )  # fmt: skip
    for other in tl.static_range(OTHERS):
        owner = tl.load((other_owners_ptr if other else owners_ptr) + row)
        score, count, drafts = _best(
            score, count, drafts, own_ptr, base, length, shared_ptr, shared_cells_ptr,
            token_owners_ptr, zero, zero, owner, tl.load(first_ptr + row),
            tl.load(end_ptr + row), shared_size, shared_buckets, factor, least, num_drafts,
            best_length, OWNED=True, DEPTH=DEPTH, DRAFTS=DRAFTS, LANES=LANES,
        )  # fmt: skip
    order = tl.arange(0, DRAFTS)
    tl.store(counts_ptr + row, count)
    tl.store(drafts_ptr + row * num_drafts + order, drafts, mask=order < num_drafts)


def note_places(text: Any, rows: Any, most: int) -> None:
    """Write the last `most` places of each row into the cells of a text.

    text, rows: `Text` and `Rows` of `plugins/speculators/suffix_tables.py`
    """
    if len(rows.end):
        launch(_note_kernel, (len(rows.end), triton.cdiv(most, PLACES)))(
            text.tokens, text.cells, rows.base, rows.cells, rows.owners, rows.first, rows.end,
            rows.size, rows.num_buckets, most, PLACES=PLACES, num_warps=4,
        )  # fmt: skip


def suffix_drafts(
    own: Any, own_rows: Any, shared: Any, others: Any, rule: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's drafts, [R, K] int32, and their numbers, [R] int32.

    own, shared: `Text`; own_rows: `Rows`; others: up to two `Rows` of the shared text, each of
    which must be better than those before; rule: `Rule`
    """
    num_rows, device = len(own_rows.end), own.tokens.device
    found = torch.empty((num_rows, rule.num_drafts), dtype=torch.int32, device=device)
    counts = torch.empty(num_rows, dtype=torch.int32, device=device)
    first = others[0] if others else own_rows
    last = others[-1] if others else own_rows
    if num_rows:
        launch(_drafts_kernel, (num_rows,))(
            found, counts, own.tokens, own.cells, own_rows.base, own_rows.cells, own_rows.end,
            own_rows.size, own_rows.num_buckets, shared.tokens, shared.cells, shared.owners,
            first.owners, last.owners, first.first, first.end, first.size, first.num_buckets,
            rule.factor, rule.least, rule.num_drafts, rule.best_length, OTHERS=len(others),
            DEPTH=rule.depth, DRAFTS=triton.next_power_of_2(rule.num_drafts),
            LANES=LEVELS.value * WAYS.value, num_warps=1,
        )  # fmt: skip
    return found, counts
