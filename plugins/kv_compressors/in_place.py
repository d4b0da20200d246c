"""Triton kernels of compressors, which score tokens in the cache. Imported as a module: without
Triton it has no kernels, and `kernels_run` says so."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ...core.nn.kv_cache.quantized_cache import KVCache, QuantizedCache, code_bits
from ...core.protocols.attention import AttentionSpec

try:
    from ...kernels.compaction.cached_tokens import CachedTokens
    from ...kernels.compaction.key_pairs import most_similar, newest_similar
    from ...kernels.compaction.key_scores import key_differences, key_norms
    from ...kernels.compaction.query_scores import attention_weights, expected_weights, scores_fit

    _MISSING = False
except ImportError:
    _MISSING = True

__all__ = [
    "attention_weights",
    "cached_tokens",
    "expected_weights",
    "kernels_run",
    "key_differences",
    "key_norms",
    "most_similar",
    "newest_similar",
    "tokens_for_queries",
]


def kernels_run(keys: torch.Tensor) -> bool:
    """Return whether the kernels run for keys of this type and device."""
    if _MISSING:
        return False
    # Triton's interpreter has no products of bfloat16.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and keys.dtype != torch.bfloat16
    return keys.is_cuda or interpreted


def cached_tokens(
    caches: Sequence[KVCache], blocks: torch.Tensor, num_tokens: int, head_dim: int
) -> CachedTokens | None:
    """Return the kernels' tokens; None if they do not run, or cannot read 4-bit heads of this
    size.
    """
    first = caches[0]
    if not kernels_run(first[0]):
        return None
    whole = head_dim >= 16 and head_dim & (head_dim - 1) == 0
    if isinstance(first, QuantizedCache) and not whole and code_bits(first.values) == 4:
        return None
    return CachedTokens(caches, blocks, num_tokens, head_dim)


def tokens_for_queries(
    spec: AttentionSpec,
    caches: Sequence[KVCache],
    blocks: torch.Tensor,
    num_tokens: int,
    queries: torch.Tensor,
    most_queries: int,
) -> CachedTokens | None:
    """As `cached_tokens`; also None for queries that do not fit the kernels, and for float32 on a
    GPU.
    """
    if not kernels_run(queries) or (queries.is_cuda and queries.itemsize == 4):
        return None
    group = spec.num_heads // spec.num_kv_heads
    if not scores_fit(group, most_queries, spec.head_dim, queries.itemsize):
        return None
    return cached_tokens(caches, blocks, num_tokens, spec.head_dim)
