"""Whether Triton kernels can score cached tokens where they lie."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

try:
    from ...kernels.compaction.cached_tokens import CachedTokens
    from ...kernels.compaction.key_scores import key_differences, key_norms
    from ...kernels.compaction.query_scores import attention_weights, expected_weights

    _MISSING = False
except ImportError:
    _MISSING = True

__all__ = ["attention_weights", "cached_tokens", "expected_weights", "key_differences", "key_norms"]


def cached_tokens(
    caches: Sequence[torch.Tensor], blocks: torch.Tensor, num_tokens: int
) -> CachedTokens | None:
    """Return what the kernels take; None where they do not run."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if _MISSING or not (caches[0].is_cuda or interpreted):
        return None
    # Triton's interpreter has no products of bfloat16.
    if interpreted and caches[0].dtype == torch.bfloat16:
        return None
    return CachedTokens(caches, blocks, num_tokens)
