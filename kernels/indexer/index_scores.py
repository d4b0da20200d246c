"""Scores of cached tokens for the queries of a step, by an indexer.

The queries of all heads are multiplied by the keys of a tile of cached tokens, and positive
products are summed by the heads' weights. Queries that see no more tokens than may be chosen are
not scored.

Operations: 2 * num_heads * index_dim for each pair of a query and a token that it sees. Memory: of
keys index_dim elements for each token and QUERIES queries of its row.

Source: DeepSeek-V3.2 (arXiv 2512.02556).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch

QUERIES = 16
"""Queries of one row that share a tile of keys in a program."""
TILES = 8
"""Tiles of keys per program; in recorded steps many programs are idle, so fewer are better."""


@triton.jit
def row_of_token(token, query_start_ptr, num_rows):
    """Return the row of a token: the last one that begins at or before it."""
    low = tl.full((), 0, tl.int32)
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) <= token:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _head_sum(query, weights, key):
    """Return the scores of a tile of keys: query [BLOCK_H, BLOCK_D], weights [BLOCK_H], key
    [BLOCK_N, BLOCK_D] → [BLOCK_N]"""
    products = tl.dot(query, tl.trans(key), input_precision="ieee")
    return tl.sum(tl.maximum(products, 0.0) * weights[:, None], axis=0)


@triton.jit
def _score_row(
    out,
    queries,
    factors,
    num_queries,
    mask_q,
    in_heads,
    table,
    cache_ptr,
    first_key,
    end_key,
    length,
    stride_scores,
    stride_query_token,
    stride_weights,
    stride_block,
    stride_slot,
    INDEX_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Score tokens [first_key, end_key) of a row for `num_queries` of its queries, of which the
    last sees `length` tokens. queries: pointers [BLOCK_H, BLOCK_D] to the first one's heads;
    factors: pointers [BLOCK_H] to its weights; out: pointer to its scores."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    in_dim = offs_d < INDEX_DIM
    if BLOCK_Q == 1:
        query = tl.load(queries, mask=mask_q, other=0.0)
        weights = tl.load(factors, mask=in_heads, other=0.0)
    for start in range(first_key, end_key, BLOCK_N):
        place = start + offs_n
        inside = place < length
        block = tl.load(table + place // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        entry = cache_ptr + block * stride_block + (place % BLOCK_SIZE) * stride_slot
        mask_key = inside[:, None] & in_dim[None, :]
        key = tl.load(entry[:, None] + offs_d[None, :], mask=mask_key, other=0.0)
        if BLOCK_Q == 1:
            tl.store(out + place, _head_sum(query, weights, key), mask=inside)
        else:
            for token in range(0, num_queries):
                query = tl.load(queries + token * stride_query_token, mask=mask_q, other=0.0)
                weights = tl.load(factors + token * stride_weights, mask=in_heads, other=0.0)
                # A query sees the tokens up to its own.
                seen = place < length - (num_queries - 1 - token)
                target = out + token * stride_scores + place
                tl.store(target, _head_sum(query, weights, key), mask=seen)


@triton.jit(
    do_not_specialize=["first_token", "end_token", "num_rows", "max_seq_len", "stride_table"]
)
def _index_scores_kernel(
    scores_ptr,
    query_ptr,
    weights_ptr,
    cache_ptr,
    block_table_ptr,
    query_start_ptr,
    positions_ptr,
    first_token,
    end_token,
    num_rows,
    max_seq_len,
    topk,
    stride_scores,
    stride_query_token,
    stride_query_head,
    stride_weights,
    stride_block,
    stride_slot,
    stride_table,
    NUM_HEADS: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per (TILES tiles of keys, BLOCK_Q tokens), for each row that has some of them."""
    offs_h = tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    in_heads = offs_h < NUM_HEADS
    mask_q = in_heads[:, None] & (offs_d < INDEX_DIM)[None, :]
    first_key = tl.program_id(0) * TILES * BLOCK_N
    begin = first_token + tl.program_id(1) * BLOCK_Q
    last = tl.minimum(begin + BLOCK_Q, end_token)
    # What comes after all rows is padding.
    last = tl.minimum(last, tl.load(query_start_ptr + num_rows))
    # As many rows, at most. Unlike a `while`, the loop disappears where that is one.
    for _ in range(0, BLOCK_Q):
        if begin < last:
            row = row_of_token(begin, query_start_ptr, num_rows)
            end = tl.minimum(last, tl.load(query_start_ptr + row + 1))
            # A row of padding may be at any position.
            length = tl.minimum(tl.load(positions_ptr + end - 1).to(tl.int32) + 1, max_seq_len)
            if (length > topk) & (first_key < length):
                first = begin.to(tl.int64)
                queries = query_ptr + first * stride_query_token
                queries = queries + offs_h[:, None] * stride_query_head + offs_d[None, :]
                _score_row(
                    scores_ptr + (first - first_token) * stride_scores, queries,
                    weights_ptr + first * stride_weights + offs_h, end - begin, mask_q, in_heads,
                    block_table_ptr + row.to(tl.int64) * stride_table, cache_ptr, first_key,
                    tl.minimum(first_key + TILES * BLOCK_N, length), length, stride_scores,
                    stride_query_token, stride_weights, stride_block, stride_slot, INDEX_DIM,
                    BLOCK_SIZE, BLOCK_Q, BLOCK_N, BLOCK_D,
                )  # fmt: skip
            begin = end


def index_scores(
    query: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    *,
    topk: int,
    max_seq_len: int,
    first_token: int,
    out: torch.Tensor,
) -> None:
    """Score the cached tokens up to each query's own, of the queries from `first_token` on.

    query, …, topk, max_seq_len: as `IndexOperations.choose_cached_tokens` has them, last strides 1,
    others free; out: [tokens, at least max_seq_len] float32, whose rows get the scores of as many
    queries. Rows of queries that see no more than `topk` tokens, and what is after a query's own
    token, may be left as they are.
    """
    num_tokens, num_heads, index_dim = query.shape
    num_rows, count = block_table.shape[0], out.shape[0]
    wide = query.dtype == torch.float32
    block_q = 1 if num_tokens <= num_rows else QUERIES
    block_n = 32 if wide else 128
    grid = triton.cdiv(max_seq_len, block_n * TILES), triton.cdiv(count, block_q)
    launch(_index_scores_kernel, grid)(
        out,
        query,
        weights,
        cache,
        block_table,
        query_start,
        positions,
        first_token,
        first_token + count,
        num_rows,
        max_seq_len,
        topk,
        out.stride(0),
        query.stride(0),
        query.stride(1),
        weights.stride(0),
        cache.stride(0),
        cache.stride(1),
        block_table.stride(0),
        NUM_HEADS=num_heads,
        INDEX_DIM=index_dim,
        BLOCK_SIZE=cache.shape[1],
        TILES=TILES,
        BLOCK_Q=block_q,
        BLOCK_H=max(16, triton.next_power_of_2(num_heads)),
        BLOCK_N=block_n,
        BLOCK_D=max(16, triton.next_power_of_2(index_dim)),
        num_warps=4,
        num_stages=2,
    )
