"""Linear layers: plain, merged (several checkpoint tensors in one), and the language-model head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from .context import BuildContext


class Linear(nn.Module):
    """y = x Wᵀ + b. weight: [out_features, in_features]."""

    def __init__(
        self, in_features: int, out_features: int, build: BuildContext, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(build.empty(out_features, in_features))
        self.bias = nn.Parameter(build.empty(out_features)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, in_features] → [num_tokens, out_features]"""
        return F.linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several linear layers over one input, as one product.

    `sizes`: shard name → out_features, stacked in order; the weight is [sum(sizes), in_features].
    """

    def __init__(
        self,
        in_features: int,
        sizes: Mapping[str, int],
        build: BuildContext,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(in_features, sum(sizes.values()), build, bias=bias)
        self.sizes = list(sizes.values())
        self.shards: dict[str, slice] = {}
        start = 0
        for name, size in sizes.items():
            self.shards[name] = slice(start, start + size)
            start += size

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[num_tokens, sum(sizes)] → one view a shard."""
        return torch.split(x, self.sizes, dim=-1)
