"""Scores of cached tokens by the last queries of their request, all layers and heads in a launch.

Two passes over the keys: the first finds the sums of the softmaxes, part by part, the second the
probabilities. Operations: 4 * head_dim * num_heads * num_queries per layer and token. Memory: keys
twice, for `expected_weights` values once; scores are written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention.decode_floats import soft_capped
from ..launch import launch
from ..widen import widen_tile
from .cached_tokens import CachedTokens, head_pointers, token_tile

TILE = 64
TILES = 16
"""Tiles per program, which reads the queries once."""
MAX_COLUMNS = 512
"""Most queries of a group, padded to a power of 2: more do not fit in registers."""
SHARED_BYTES = 200 << 10
"""Shared memory for queries and keys, out of Hopper's 227 KiB."""


@triton.jit
def _query_columns(
    queries_ptr, layer, head, num_queries,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return the queries of a kv head's group, [BLOCK_D, BLOCK_G * BLOCK_Q], head by head; their
    numbers, and which exist.
    """
    column = tl.arange(0, BLOCK_G * BLOCK_Q)
    dim = tl.arange(0, BLOCK_D)
    group, number = column // BLOCK_Q, column % BLOCK_Q
    exists = (group < GROUP) & (number < num_queries)
    row = (layer * num_queries + number) * (NUM_KV_HEADS * GROUP) + head * GROUP + group
    mask = (dim < HEAD_DIM)[:, None] & exists[None, :]
    source = queries_ptr + row[None, :] * HEAD_DIM + dim[:, None]
    return tl.load(source, mask=mask, other=0.0), number, exists


@triton.jit
def _attended(
    key, query, number, exists, place, num_tokens, num_queries, scale, SOFT_CAP: tl.constexpr
):
    """Return the logits of the last queries, [N, columns], -inf where a query does not see."""
    logits = soft_capped(tl.dot(key, query, input_precision="ieee") * scale, SOFT_CAP)
    last = num_tokens - num_queries + number
    seen = (place[:, None] <= last[None, :]) & exists[None, :] & (place < num_tokens)[:, None]
    return tl.where(seen, logits, -float("inf"))


@triton.jit
def _expected(
    key, query, number, place, num_tokens, num_queries, scale, SOFT_CAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Return the logarithms of the expected exponentials of logits, [N, BLOCK_G]: mean + variance
    / 2 over the queries; -inf beyond the tokens."""
    logits = soft_capped(tl.dot(key, query, input_precision="ieee") * scale, SOFT_CAP)
    logits = tl.reshape(logits, (BLOCK_N, BLOCK_G, BLOCK_Q))
    mean = tl.sum(logits, axis=2) / num_queries
    apart = logits - mean[:, :, None]
    counts = tl.arange(0, BLOCK_Q) < num_queries
    apart = tl.where(counts[None, None, :], apart, 0.0)
    expected = mean + tl.sum(apart * apart, axis=2) / (2.0 * num_queries)
    return tl.where((place < num_tokens)[:, None], expected, -float("inf"))


@triton.jit(
    do_not_specialize=["num_tokens", "num_queries"], do_not_specialize_on_alignment=["blocks_ptr"]
)
def _query_scores_kernel(
    out_ptr,
    log_sums_ptr,
    queries_ptr,
    addresses_ptr,
    like_key_ptr,
    like_value_ptr,
    blocks_ptr,
    num_tokens,
    stride_block,
    stride_slot,
    stride_head,
    stride_value_block,
    stride_value_slot,
    stride_value_head,
    num_queries,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    EXPECTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_TILES: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    """Write the logarithm of a part's sum of exponentials, for each query, or, if EXPECTED, for
    each query head. With WEIGHTS, and those sums over all parts in log_sums_ptr, each token's mean
    probability: over the queries that see it; or, if EXPECTED, over query heads, times the norm of
    its value. One program per (kv head, part, layer)."""
    COLUMNS: tl.constexpr = BLOCK_G if EXPECTED else BLOCK_G * BLOCK_Q
    head = tl.program_id(0)
    part = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    keys, key_words = head_pointers(
        addresses_ptr, like_key_ptr, layer, head, stride_head, KEY_BITS, ALIGNED, False
    )
    if WEIGHTS and EXPECTED:
        values, value_words = head_pointers(
            addresses_ptr, like_value_ptr, layer, head, stride_value_head, VALUE_BITS, ALIGNED, True
        )
    row = layer * NUM_KV_HEADS + head
    query, number, exists = _query_columns(
        queries_ptr, layer, head, num_queries,
        NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_G, BLOCK_Q, BLOCK_D,
    )  # fmt: skip
    column = tl.arange(0, COLUMNS)
    if WEIGHTS:
        log_sum = tl.load(log_sums_ptr + row * COLUMNS + column)
        if not EXPECTED:
            # Columns of no query have no sum.
            log_sum = tl.where(exists, log_sum, 0.0)
    else:
        m = tl.full([COLUMNS], -float("inf"), tl.float32)
        total = tl.zeros([COLUMNS], tl.float32)
    for tile in range(part * NUM_TILES, (part + 1) * NUM_TILES):
        place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        key = token_tile(
            keys, key_words, blocks_ptr, head, place, num_tokens, stride_block, stride_slot,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_D, KEY_BITS,
        )  # fmt: skip
        key = widen_tile(key, query.dtype)
        if EXPECTED:
            logits = _expected(
                key, query, number, place, num_tokens, num_queries, scale, SOFT_CAP,
                BLOCK_N, BLOCK_G, BLOCK_Q,
            )  # fmt: skip
        else:
            logits = _attended(
                key, query, number, exists, place, num_tokens, num_queries, scale, SOFT_CAP
            )
        if not WEIGHTS:
            m_new = tl.maximum(m, tl.max(logits, axis=0))
            pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
            total = total * tl.exp(m - pivot) + tl.sum(tl.exp(logits - pivot[None, :]), axis=0)
            m = m_new
        else:
            weights = tl.exp(logits - log_sum[None, :])
            if EXPECTED:
                weights = tl.where((column < GROUP)[None, :], weights, 0.0)
                value = token_tile(
                    values, value_words, blocks_ptr, head, place, num_tokens, stride_value_block,
                    stride_value_slot, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_D, VALUE_BITS,
                ).to(tl.float32)  # fmt: skip
                score = tl.sum(weights, axis=1) / GROUP * tl.sqrt(tl.sum(value * value, axis=1))
            else:
                seeing = tl.maximum(tl.minimum(num_tokens - place, num_queries), 1)
                score = tl.sum(weights, axis=1) / (GROUP * seeing)
            tl.store(out_ptr + row * num_tokens + place, score, mask=place < num_tokens)
    if not WEIGHTS:
        log_sum = m + tl.log(tl.where(total > 0.0, total, 1.0))
        log_sum = tl.where(total > 0.0, log_sum, -float("inf"))
        tl.store(out_ptr + (row * tl.num_programs(1) + part) * COLUMNS + column, log_sum)


def _columns(group: int, most_queries: int) -> tuple[int, int]:
    block_g, block_q = (triton.next_power_of_2(count) for count in (group, most_queries))
    return block_g, max(block_q, 16 // block_g)


def _stages(columns: int, head_dim: int, itemsize: int) -> int:
    """Return the pipeline stages that shared memory allows: 0 to 3."""
    row_bytes = max(16, int(triton.next_power_of_2(head_dim))) * itemsize
    return min(3, max(0, SHARED_BYTES // row_bytes - columns) // TILE)


def scores_fit(group: int, most_queries: int, head_dim: int, itemsize: int) -> bool:
    """Return whether the kernels fit these sizes. group: query heads per KV head; itemsize: of the
    queries
    """
    block_g, block_q = _columns(group, most_queries)
    columns = block_g * block_q
    return columns <= MAX_COLUMNS and _stages(columns, head_dim, itemsize) > 0


def _scores(
    tokens: CachedTokens,
    queries: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    most_queries: int,
    expected: bool,
) -> torch.Tensor:
    num_layers, num_kv_heads, num_tokens = tokens.shape
    _, num_queries, num_heads, head_dim = queries.shape
    assert queries.is_contiguous() and num_queries <= most_queries
    group = num_heads // num_kv_heads
    block_g, block_q = _columns(group, most_queries)
    arguments, constants = tokens.launch_arguments()
    constants |= {
        "GROUP": group, "BLOCK_G": block_g, "BLOCK_Q": block_q, "SOFT_CAP": soft_cap or 0.0,
        "EXPECTED": expected, "BLOCK_N": TILE, "NUM_TILES": TILES,
        "num_warps": 4 if block_g * block_q < 256 else 8,
        "num_stages": _stages(block_g * block_q, head_dim, queries.element_size()),
    }  # fmt: skip
    columns = block_g if expected else block_g * block_q
    parts = triton.cdiv(num_tokens, TILE * TILES)
    shape = num_layers, num_kv_heads, parts, columns
    sums = torch.empty(shape, dtype=torch.float32, device=queries.device)
    grid = num_kv_heads, parts, num_layers
    launch(_query_scores_kernel, grid)(
        sums, None, queries, *arguments, num_queries, scale, **constants, WEIGHTS=False
    )
    log_sums = sums.logsumexp(2)
    out = torch.empty(tokens.shape, dtype=torch.float32, device=queries.device)
    launch(_query_scores_kernel, grid)(
        out, log_sums, queries, *arguments, num_queries, scale, **constants, WEIGHTS=True
    )
    return out


def attention_weights(
    tokens: CachedTokens,
    queries: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    most_queries: int,
) -> torch.Tensor:
    """Return the mean probability that the last queries which see a token give it, [L,
    num_kv_heads, num_tokens] float32. queries: [L, Q, num_heads, head_dim], contiguous, oldest
    first, of the cache's type, or of one that has its numbers; most_queries: of any call, so that
    fewer of them need no other kernel."""
    return _scores(tokens, queries, scale, soft_cap, most_queries, expected=False)


def expected_weights(
    tokens: CachedTokens,
    queries: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    most_queries: int,
) -> torch.Tensor:
    """Return each token's probability under queries of the same normal distribution, times the norm
    of its value; arguments as of `attention_weights`.
    """
    return _scores(tokens, queries, scale, soft_cap, most_queries, expected=True)
