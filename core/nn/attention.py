"""One layer's attention: it knows its shape and holds its cache; the backend does the work."""

from __future__ import annotations

import torch
from torch import nn

from ..protocols import AttentionSpec
from .context import ForwardContext


class Attention(nn.Module):
    """Causal attention over the paged cache that the worker binds to `kv_cache`."""

    kv_cache: torch.Tensor | None

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.kv_cache = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor:
        """query: [num_tokens, num_heads, head_dim], key and value: [num_tokens, num_kv_heads,
        head_dim] → [num_tokens, num_heads * head_dim]"""
        assert self.kv_cache is not None, "the worker binds the cache before the first step"
        out = context.attend(self.spec, query, key, value, self.kv_cache)
        return out.reshape(out.shape[0], -1)
