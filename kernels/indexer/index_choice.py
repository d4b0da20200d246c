"""Which cached tokens the queries of a step read, by an indexer's scores.

The best tokens of each query are kept without sorting, and their slots looked up. This and the
scoring (index_scores.py) run over a few queries at a time, so scores fit a buffer of fixed size,
and launches depend only on sizes and upper bounds of a step.

Long rows of few queries are divided: PARTS programs keep the best of a part each, and one the best
of those.

Memory: a row of scores is read 17 times, all but the first from a cache.

Source: DeepSeek-V3.2 (arXiv 2512.02556).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import compile_only, empty_indices, launch
from .index_scores import index_scores, row_of_token
from .top_scores import MAX_TILE, kept_of_tile, lowest_kept

PARTS = 8
"""Most parts of a divided row of scores."""
FEW_QUERIES = 64
"""Most queries whose rows are divided. An estimate: more rows occupy a GPU with one program
each."""
LONG_ROW = 4 * MAX_TILE
"""Fewest scores of a divided row."""


@triton.jit
def _num_scores(positions_ptr, token, max_seq_len):
    """Return the number of tokens that a query sees. Padding may be at any position."""
    return tl.minimum(tl.load(positions_ptr + token).to(tl.int32) + 1, max_seq_len)


@triton.jit
def _part_size(num_scores, topk, num_parts, BLOCK: tl.constexpr):
    """Return the scores of each part of a row but the last: whole tiles, and at least `topk`, so
    that all parts but the last keep as many. A row of one part is not divided."""
    size = tl.maximum(tl.cdiv(num_scores, num_parts), topk)
    return tl.cdiv(size, BLOCK) * BLOCK


@triton.jit(do_not_specialize=["first_token", "max_seq_len", "num_parts"])
def _part_choice_kernel(
    scores_ptr,
    best_ptr,
    places_ptr,
    positions_ptr,
    first_token,
    max_seq_len,
    topk,
    num_parts,
    stride_scores,
    BLOCK: tl.constexpr,
):
    """One program per (token, part of its scores)."""
    local = tl.program_id(0)
    part = tl.program_id(1)
    length = _num_scores(positions_ptr, first_token + local, max_seq_len)
    size = _part_size(length, topk, num_parts, BLOCK)
    begin = part * size
    if (size >= length) | (begin >= length):
        return
    length = tl.minimum(length - begin, size)
    scores = scores_ptr + local.to(tl.int64) * stride_scores + begin
    out = (local * num_parts + part).to(tl.int64) * topk
    offs = tl.arange(0, BLOCK)
    limit, num_equal = lowest_kept(scores, length, tl.minimum(length, topk), BLOCK)
    written = tl.zeros((), tl.int32)
    for start in range(0, length, BLOCK):
        place = start + offs
        stays, target, num_equal, written = kept_of_tile(
            scores, place, length, limit, num_equal, written
        )
        tl.store(best_ptr + out + target, tl.load(scores + place, mask=stays), mask=stays)
        tl.store(places_ptr + out + target, begin + place, mask=stays)


@triton.jit(
    do_not_specialize=["first_token", "num_rows", "max_seq_len", "num_parts", "stride_table"]
)
def _index_choice_kernel(
    scores_ptr,
    best_ptr,
    places_ptr,
    slots_ptr,
    counts_ptr,
    block_table_ptr,
    query_start_ptr,
    positions_ptr,
    first_token,
    num_rows,
    max_seq_len,
    topk,
    num_parts,
    stride_scores,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    local = tl.program_id(0)
    token = first_token + local
    row = row_of_token(token, query_start_ptr, num_rows)
    table = block_table_ptr + row.to(tl.int64) * stride_table
    length = _num_scores(positions_ptr, token, max_seq_len)
    count = tl.minimum(length, topk)
    tl.store(counts_ptr + token, count)
    out = slots_ptr + token.to(tl.int64) * topk
    offs = tl.arange(0, BLOCK)
    if length <= topk:
        for start in range(0, topk, BLOCK):
            place = start + offs
            block = tl.load(table + place // BLOCK_SIZE, mask=place < length, other=0)
            slot = block * BLOCK_SIZE + place % BLOCK_SIZE
            tl.store(out + place, tl.where(place < length, slot, 0), mask=place < topk)
        return
    scores = scores_ptr + local.to(tl.int64) * stride_scores
    size = _part_size(length, topk, num_parts, BLOCK)
    divided = size < length
    best = (local * num_parts).to(tl.int64) * topk
    if divided:
        # All parts but the last have kept topk scores.
        last = (length - 1) // size
        length = last * topk + tl.minimum(length - last * size, topk)
        scores = best_ptr + best
    limit, num_equal = lowest_kept(scores, length, topk, BLOCK)
    written = tl.zeros((), tl.int32)
    for start in range(0, length, BLOCK):
        place = start + offs
        stays, target, num_equal, written = kept_of_tile(
            scores, place, length, limit, num_equal, written
        )
        if divided:
            place = tl.load(places_ptr + best + place, mask=stays, other=0)
        block = tl.load(table + place // BLOCK_SIZE, mask=stays, other=0)
        tl.store(out + target, block * BLOCK_SIZE + place % BLOCK_SIZE, mask=stays)


def divides_rows(num_queries: int, max_seq_len: int) -> bool:
    return num_queries <= FEW_QUERIES and max_seq_len >= LONG_ROW


def index_choice(
    scores: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    *,
    block_size: int,
    max_seq_len: int,
    first_token: int,
    best: torch.Tensor | None = None,
) -> None:
    """Keep the best tokens of as many queries as `scores` has rows, from `first_token` on; among
    equal scores the earlier ones.

    scores: what `index_scores` wrote; slots: [num_tokens, topk] int32, contiguous, and counts:
    [num_tokens] int32 get what `ChosenTokens` has, of these queries; block_table, query_start,
    positions: as `IndexOperations.choose_cached_tokens` has them; best: [2, queries, PARTS, topk]
    float32, contiguous, contents free, for what parts of long rows keep; None: rows are not
    divided.
    """
    topk, num_parts = slots.shape[1], 1 if best is None else PARTS
    kept, places = (scores, counts) if best is None else (best[0], best[1].view(torch.int32))
    if best is not None:
        launch(_part_choice_kernel, (scores.shape[0], num_parts))(
            scores,
            kept,
            places,
            positions,
            first_token,
            max_seq_len,
            topk,
            num_parts,
            scores.stride(0),
            BLOCK=MAX_TILE,
            num_warps=16,
        )
    launch(_index_choice_kernel, (scores.shape[0],))(
        scores,
        kept,
        places,
        slots,
        counts,
        block_table,
        query_start,
        positions,
        first_token,
        block_table.shape[0],
        max_seq_len,
        topk,
        num_parts,
        scores.stride(0),
        block_table.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=MAX_TILE,
        num_warps=16,
    )


def choose_cached_tokens(
    query: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    *,
    topk: int,
    max_seq_len: int,
    workspace: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return slots [num_tokens, topk] and counts [num_tokens], int32: see
    `IndexOperations.choose_cached_tokens`. workspace: float32, contents free, at least what a query
    needs: max_seq_len, rounded up to a multiple of 16, and 2 * PARTS * topk where rows are divided.
    As many queries as it holds are scored at once. No host synchronisation; safe to capture."""
    num_tokens = query.shape[0]
    slots = empty_indices(num_tokens, topk, device=query.device)
    counts = empty_indices(num_tokens, device=query.device)
    width = triton.cdiv(max_seq_len, 16) * 16
    # A `Precompiler` needs the kernels of longer rows, too.
    divided = divides_rows(num_tokens, LONG_ROW if compile_only.get() else max_seq_len)
    kept = 2 * PARTS * topk if divided else 0
    most = workspace.numel() // (width + kept)
    if most == 0:
        raise ValueError(
            f"workspace has {workspace.numel()} elements; a query needs {width + kept}"
        )
    for first in range(0, num_tokens, most):
        count = min(most, num_tokens - first)
        scores, best = workspace[: count * (width + kept)].tensor_split((count * width,))
        scores = scores.view(count, width)
        index_scores(
            query, weights, cache, block_table, query_start, positions, topk=topk,
            max_seq_len=max_seq_len, first_token=first, out=scores,
        )  # fmt: skip
        index_choice(
            scores, slots, counts, block_table, query_start, positions,
            block_size=cache.shape[1], max_seq_len=max_seq_len, first_token=first,
            best=best.view(2, count, PARTS, topk) if divided else None,
        )  # fmt: skip
    return slots, counts
