"""Linear layers: plain, and merged (several checkpoint tensors in one).

A layer takes the norm before it and the residual after it as arguments, so that an implementation
may compute all three in one pass over the weight. A quantization method replaces such a layer by a
`QuantizedLinear` (`quantized.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from .context import BuildContext
from .norm import before_product


class Linear(nn.Module):
    """y = residual + norm(x) Wᵀ + b. weight: [out_features, in_features]."""

    gated: ClassVar[bool] = False
    """The result is silu(first half) * second half of the product."""

    def __init__(
        self, in_features: int, out_features: int, build: BuildContext, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(build.weight(out_features, in_features))
        self.bias = nn.Parameter(build.empty(out_features)) if bias else None
        self.operations = build.operations

    def forward(
        self,
        x: torch.Tensor,
        *,
        norm: nn.Module | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[num_tokens, in_features] → [num_tokens, out_features]; `residual` may be overwritten."""
        x, fused = before_product(x, norm)
        return self.operations.linear(x, self.weight, self.bias, norm=fused, residual=residual)


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
        self.shards: dict[str, slice] = {}
        start = 0
        for name, size in sizes.items():
            self.shards[name] = slice(start, start + size)
            start += size


class GatedLinear(MergedLinear):
    """silu(gate) * up of one product.

    `whole`: the checkpoint has both as one tensor, gate's rows first.
    """

    gated: ClassVar[bool] = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        build: BuildContext,
        *,
        bias: bool = False,
        whole: bool = False,
    ) -> None:
        super().__init__(in_features, {"gate": out_features, "up": out_features}, build, bias=bias)
        if whole:
            self.shards = {}

    def forward(
        self,
        x: torch.Tensor,
        *,
        norm: nn.Module | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[num_tokens, in_features] → [num_tokens, out_features]"""
        assert residual is None, "a gate has no residual"
        x, fused = before_product(x, norm)
        return self.operations.gated_linear(x, self.weight, self.bias, norm=fused)
