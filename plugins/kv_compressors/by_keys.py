"""Policies that need no queries: by position, and by keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F

from ...core.nn.kv_cache.quantized_cache import KVCache
from ...core.protocols.attention import AttentionSpec
from ...core.protocols.kv_compressors import KVCompressor
from . import in_place

SINKS = 4
"""First tokens that always stay: attention sinks (arXiv 2309.17453)."""
RECENT = 8
"""Last tokens that always stay, as the context of the next."""


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return a matrix product, maybe batched, in float32.

    On a GPU, 16-bit inputs are not copied to float32.
    """
    if left.is_cuda and left.dtype == right.dtype and left.itemsize == 2:
        multiply = torch.mm if left.dim() == 2 else torch.bmm
        return multiply(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def keep_ends(scores: torch.Tensor) -> torch.Tensor:
    """Give the first and last tokens the highest score. scores: [..., num_tokens], changed"""
    scores[..., :SINKS] = torch.inf
    scores[..., -RECENT:] = torch.inf
    return scores


class Window(KVCompressor):
    """Keep the first tokens and the most recent ones, as StreamingLLM (arXiv 2309.17453) does."""

    reads_values: ClassVar[bool] = False

    def scores(
        self,
        spec: AttentionSpec,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scores = torch.arange(keys.shape[0], dtype=torch.float32, device=keys.device)
        scores[:SINKS] = torch.inf
        return scores[:, None].expand(-1, keys.shape[1])

    def cached_scores(
        self,
        spec: AttentionSpec,
        caches: Sequence[KVCache],
        blocks: torch.Tensor,
        num_tokens: int,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """The same for all layers and heads: nothing is read."""
        scores = torch.arange(num_tokens, dtype=torch.float32, device=blocks.device)
        scores[:SINKS] = torch.inf
        return scores.expand(len(caches), spec.num_kv_heads, -1)


class KeyNorm(KVCompressor):
    """Keep the keys with the smallest norms, which get the most attention (arXiv 2406.11430), and
    the first and last tokens. Rotation does not change norms."""

    reads_values: ClassVar[bool] = False

    def scores(
        self,
        spec: AttentionSpec,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scores: torch.Tensor = -torch.linalg.vector_norm(keys, dim=2, dtype=torch.float32)
        return keep_ends(scores.T).T

    def cached_scores(
        self,
        spec: AttentionSpec,
        caches: Sequence[KVCache],
        blocks: torch.Tensor,
        num_tokens: int,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        tokens = in_place.cached_tokens(caches, blocks, num_tokens, spec.head_dim)
        return (
            None if tokens is None else keep_ends(in_place.key_norms(tokens).mul_(-spec.key_scale))
        )


class KeyDiff(KVCompressor):
    """Keep the keys that differ most from the mean direction of all, as KeyDiff (arXiv 2504.15364)
    does, and the first and last tokens."""

    reads_values: ClassVar[bool] = False

    def scores(
        self,
        spec: AttentionSpec,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        count, heads, dim = keys.shape
        # Keys of no length have no direction; the inverse must not overflow in float16.
        norms = torch.linalg.vector_norm(keys, dim=2, dtype=torch.float32).clamp_(min=1e-4)
        flat = keys.reshape(count, heads * dim)
        # All heads in one product, of which the blocks on the diagonal count.
        sums = product((1 / norms).to(keys.dtype).T, flat).view(heads, heads, dim)
        mean = F.normalize(sums.diagonal(), dim=0).to(keys.dtype)
        blocks = torch.diag_embed(mean).transpose(0, 1).reshape(heads * dim, heads)
        scores: torch.Tensor = -product(flat, blocks) / norms
        return keep_ends(scores.T).T

    def cached_scores(
        self,
        spec: AttentionSpec,
        caches: Sequence[KVCache],
        blocks: torch.Tensor,
        num_tokens: int,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        tokens = in_place.cached_tokens(caches, blocks, num_tokens, spec.head_dim)
        return None if tokens is None else keep_ends(in_place.key_differences(tokens))
