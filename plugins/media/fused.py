"""Attention of towers whose checkpoints have queries, keys and values in one tensor, where the
modules of `transformers` have three."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.nn.sdpa import sdpa


class FusedAttention(nn.Module):
    def __init__(self, own: Any, proj: nn.Module) -> None:
        """own: what it takes the place of; proj: its last part."""
        super().__init__()
        width: int = own.embed_dim
        self.qkv = nn.Linear(width, 3 * width, bias=own.q_proj.bias is not None)
        self.q_norm, self.k_norm = (getattr(own, name, None) for name in ("q_norm", "k_norm"))
        self.proj, self._num_heads = proj, own.num_heads

    def forward(self, hidden_states: torch.Tensor, **others: Any) -> tuple[torch.Tensor, None]:
        query, key, value = self.qkv(hidden_states).chunk(3, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        heads = (
            part.unflatten(-1, (self._num_heads, -1)).transpose(1, 2)
            for part in (query, key, value)
        )
        out = sdpa(*heads)
        return self.proj(out.transpose(1, 2).flatten(2)), None
