"""Token embeddings, and the head that may share them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .context import BuildContext
from .norm import before_product


class Embedding(nn.Module):
    """weight: [vocab_size, hidden_size]; bias: [vocab_size], of a head that has one."""

    def __init__(
        self, vocab_size: int, hidden_size: int, build: BuildContext, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(build.weight(vocab_size, hidden_size))
        self.bias = nn.Parameter(build.empty(vocab_size)) if bias else None
        self.operations = build.operations

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] → [num_tokens, hidden_size]"""
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: torch.Tensor, *, norm: nn.Module | None = None) -> torch.Tensor:
        """Compute logits, tied or not: [num_rows, hidden_size] → [num_rows, vocab_size]"""
        hidden, fused = before_product(hidden, norm)
        return self.operations.linear(hidden, self.weight, self.bias, norm=fused)
