"""Building blocks of encoders: attention in both directions, without a cache."""

from __future__ import annotations

import torch
from torch import nn

from .context import BuildContext
from .operations import HeadLayout, split_heads
from .ragged import RaggedRows


class BidirectionalAttention(nn.Module):
    """Every token of a row sees every other one. It has no parameters and no cache."""

    def __init__(self, num_heads: int, head_dim: int, build: BuildContext) -> None:
        super().__init__()
        self.layout = HeadLayout(num_heads, num_heads, head_dim)
        self.scale = head_dim**-0.5
        self.operations = build.operations

    def forward(self, qkv: torch.Tensor, rows: RaggedRows) -> torch.Tensor:
        """[num_tokens, 3 * num_heads * head_dim] → [num_tokens, num_heads * head_dim]"""
        heads = split_heads(qkv, self.layout)
        out = self.operations.bidirectional_attention(*heads, rows, self.scale)
        return out.flatten(1)
