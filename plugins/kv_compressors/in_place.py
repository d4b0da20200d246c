"""The Triton kernels of compressors, where they run: they score tokens where they are cached."""

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
    """Return whether they do, on keys of this type where these are."""
    if _MISSING:
        return False
    # Triton's interpreter has no products of bfloat16.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and keys.dtype != torch.bfloat16
    return keys.is_cuda or interpreted


def cached_tokens(
    caches: Sequence[KVCache], blocks: torch.Tensor, num_tokens: int, head_dim: int
) -> CachedTokens | None:
    """Return what the kernels take; None where they do not run, or for heads whose halves of 4 bits
    they do not read."""
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
    """As `cached_tokens`; None also for more queries, or wider ones, than the kernels hold, and on
    a GPU for float32, of which tensor cores have no products."""
    if not kernels_run(queries) or (queries.is_cuda and queries.itemsize == 4):
        return None
    group = spec.num_heads // spec.num_kv_heads
    if not scores_fit(group, most_queries, spec.head_dim, queries.itemsize):
        return None
    return cached_tokens(caches, blocks, num_tokens, spec.head_dim)
