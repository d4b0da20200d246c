"""Policies that need no queries: by position, and by keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...core.protocols.attention import AttentionSpec
from ...core.protocols.kv_compressors import KVCompressor

SINKS = 4
"""First tokens that always stay: models put much of their attention there (arXiv 2309.17453)."""
RECENT = 8
"""Last tokens that always stay: what the next token continues."""


class Window(KVCompressor):
    """Keep the first tokens and the most recent ones, as StreamingLLM (arXiv 2309.17453) does."""

    def scores(
        self,
        spec: AttentionSpec,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[num_tokens, num_kv_heads, head_dim] each → [num_tokens, num_kv_heads]"""
        scores = torch.arange(keys.shape[0], dtype=torch.float32, device=keys.device)
        scores[:SINKS] = torch.inf
        return scores[:, None].expand(-1, keys.shape[1])


class KeyNorm(KVCompressor):
    """Keep the keys with the smallest norms, which get the most attention (arXiv 2406.11430), and
    the first and last tokens. Rotation does not change norms."""

    def scores(
        self,
        spec: AttentionSpec,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[num_tokens, num_kv_heads, head_dim] each → [num_tokens, num_kv_heads]"""
        scores: torch.Tensor = -keys.float().norm(dim=2)
        scores[:SINKS] = torch.inf
        scores[-RECENT:] = torch.inf
        return scores


class KeyDiff(KVCompressor):
    """Keep the keys that differ most from the mean direction of all, as KeyDiff (arXiv 2504.15364)
    does, and the first and last tokens."""

    def scores(
        self,
        spec: AttentionSpec,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[num_tokens, num_kv_heads, head_dim] each → [num_tokens, num_kv_heads]"""
        directions = F.normalize(keys.float(), dim=2)
        mean = F.normalize(directions.mean(0), dim=1)
        scores = -(directions * mean).sum(2)
        scores[:SINKS] = torch.inf
        scores[-RECENT:] = torch.inf
        return scores
