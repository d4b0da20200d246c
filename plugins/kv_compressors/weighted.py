"""A policy that weighs attention and norms."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from ...core.protocols.attention import AttentionSpec
from ...core.protocols.kv_compressors import KVCompressor
from .by_keys import RECENT, SINKS, keep_ends
from .by_queries import attention_logits, hide_later_tokens


class Weighted(KVCompressor):
    """Keep tokens by a weighted sum of the attention that they got from the last queries and of the
    norms of their keys and values, each divided by the largest of its head. What is near the top in
    one of the three stays before all else, and so does a key that is unlike the others.

    Unlike `key_norm`, it takes long keys for important. For other weights, subclass it.
    """

    num_queries: ClassVar[int] = 16
    attention: ClassVar[float] = 0.4
    key_norm: ClassVar[float] = 0.4
    value_norm: ClassVar[float] = 0.2
    protected: ClassVar[float] = 0.9
    """Share of the largest from which one measure suffices."""
    outlier: ClassVar[float] = 0.3
    """Cosine with the mean direction of the keys below which a key is unlike the others."""

    def scores(
        self,
        spec: AttentionSpec,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The weighted sum, in 0 .. 1, and 1 more for each reason to stay before all else."""
        assert queries is not None, "num_queries is not 0"
        logits = hide_later_tokens(attention_logits(spec, keys, queries))
        received = logits.softmax(-1).mean((1, 2)).T
        norms = [torch.linalg.vector_norm(x, dim=2, dtype=torch.float32) for x in (keys, values)]
        # The first and last tokens stay anyway; sinks would outshine all others.
        whole = len(keys) <= SINKS + RECENT
        inner = slice(None) if whole else slice(SINKS, -RECENT)
        measures = [
            (each / each[inner].amax(0).clamp_(min=1e-12)).clamp_(max=1.0)
            for each in (received, *norms)
        ]
        weights = (self.attention, self.key_norm, self.value_norm)
        scores: torch.Tensor = sum(
            weight * each for weight, each in zip(weights, measures, strict=True)
        )
        highest = torch.stack(measures).amax(0)
        directions = keys.float() / norms[0].clamp(min=1e-4)[:, :, None]
        mean = F.normalize(directions.sum(0), dim=1)
        unlike = (directions * mean).sum(2) < self.outlier
        scores = scores + (highest >= self.protected) + unlike
        return keep_ends(scores.T).T
