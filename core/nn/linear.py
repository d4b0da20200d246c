"""Linear layers: plain, and merged (several checkpoint tensors in one).

A layer takes the norm before it and the residual after it as arguments, so that an implementation
may compute all three in one pass over the weight. A quantization method replaces such a layer by a
`QuantizedLinear` (`quantized.py`).

With several ranks, a layer that says what they divide (`shard`) holds this rank's part: of its
output features ("out"), or of its input features ("in"); then its result is one term of a sum
(`Ranks.add`), and the first rank alone has the bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from ..parallel.sharding import Features, Sharding, even_slice, length
from .context import BuildContext
from .layer_operations.products import NormSums
from .norm import NO_SUMS, LayerNorm, before_product


class Linear(nn.Module):
    """y = residual + norm(x) Wᵀ + b. weight: [out_features, in_features]."""

    gated: ClassVar[bool] = False
    """The result is silu(first half) * second half of the product."""
    norm_sums: Mapping[nn.Module, NormSums] = NO_SUMS
    """Of the norm before it, if it is a LayerNorm: see `expect`."""
    shardings: dict[str, Sharding]
    """Parameter → the part of it that this rank holds; without those that it holds whole."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        build: BuildContext,
        *,
        bias: bool = False,
        shard: Features | None = None,
        share: slice | None = None,
    ) -> None:
        """Sizes are those of the whole layer; `share`: this rank's features, of those that ranks
        divide. Raises ConfigError if ranks cannot divide it."""
        super().__init__()
        group, sharding = build.ranks.tensor, None
        if shard is not None and group.size > 1:
            size = out_features if shard == "out" else in_features
            rank_slices = (share or even_slice(size, group),)
            sharding = Sharding(0 if shard == "out" else 1, {"": size}, {"": rank_slices})
        self._create(in_features, out_features, build, bias, sharding)

    def _create(
        self,
        in_features: int,
        out_features: int,
        build: BuildContext,
        bias: bool,
        sharding: Sharding | None,
    ) -> None:
        self.operations, self.shardings = build.operations, {}
        if sharding is not None:
            self.shardings["weight"] = self.shardings["bias"] = sharding
            size = sum(map(length, sharding.slices.values()))
            if sharding.dim == 0:
                out_features = size
            else:
                in_features = size
                first = build.ranks.tensor.rank == 0
                self.shardings["bias"] = Sharding(0, {}, {}, kept=False)
                if first:
                    del self.shardings["bias"]
        self.weight = nn.Parameter(build.weight(out_features, in_features))
        self.bias = nn.Parameter(build.empty(out_features)) if bias else None

    def forward(
        self,
        x: torch.Tensor,
        *,
        norm: nn.Module | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[num_tokens, in_features] → [num_tokens, out_features]; `residual` may be overwritten."""
        x, fused = before_product(x, norm, self.operations, "linear", self.norm_sums)
        return self.operations.linear(x, self.weight, self.bias, norm=fused, residual=residual)

    def ungated(self, x: torch.Tensor, *, norm: nn.Module | None = None) -> torch.Tensor:
        """norm(x) Wᵀ + b, of a layer with gates too: [num_tokens, in_features] → [num_tokens, rows
        of the weight]"""
        x, fused = before_product(x, norm, self.operations, "linear", self.norm_sums)
        return self.operations.linear(x, self.weight, self.bias, norm=fused)

    @torch.no_grad()
    def expect(self, norm: nn.Module | None) -> None:
        """Prepare for the norm that comes before this product, once both are loaded."""
        if isinstance(norm, LayerNorm) and "linear.norm_sums" in self.operations.features:
            self.norm_sums = {norm: norm.sums(self.weight, self.bias)}

    def add_scaled(self, residual: torch.Tensor, x: torch.Tensor, factor: float) -> torch.Tensor:
        """residual + factor * (x Wᵀ + b), where one rank has the whole weight; `residual` may be
        overwritten."""
        if "linear.factor" not in self.operations.features:
            return torch.add(residual, self(x), alpha=factor)
        return self.operations.linear(x, self.weight, self.bias, residual=residual, factor=factor)

    def activated(
        self, x: torch.Tensor, activation: str, *, norm: nn.Module | None = None
    ) -> torch.Tensor:
        """activation(norm(x) Wᵀ + b): [num_tokens, in_features] → [num_tokens, out_features]"""
        x, fused = before_product(x, norm, self.operations, "activated_linear", self.norm_sums)
        return self.operations.activated_linear(
            x, self.weight, self.bias, activation=activation, norm=fused
        )


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
        shard: Features | None = None,
        shares: Mapping[str, slice | tuple[slice, ...]] | None = None,
        whole: bool = False,
    ) -> None:
        """`whole`: the checkpoint has all of them as one tensor. `shard`: "out" divides each of
        `sizes`, evenly, or as `shares` says: shard name → this rank's features; for "in" they are
        named ""."""
        nn.Module.__init__(self)
        group, sharding, own = build.ranks.tensor, None, dict(sizes)
        if shard is not None and group.size > 1:
            if shard == "in":
                share = (shares or {}).get("") or even_slice(in_features, group)
                sharding = Sharding(1, {"": in_features}, {"": _slices(share)})
            else:
                shares = shares or {name: even_slice(size, group) for name, size in sizes.items()}
                sharding = _out_sharding(sizes, shares, whole)
                own = {name: length(_slices(shares[name])) for name in sizes}
        self._create(in_features, sum(sizes.values()), build, bias, sharding)
        self.shards: dict[str, slice] = {}
        start = 0
        for name, size in own.items() if not whole else ():
            self.shards[name] = slice(start, start + size)
            start += size


def _slices(share: slice | tuple[slice, ...]) -> tuple[slice, ...]:
    return share if isinstance(share, tuple) else (share,)


def _out_sharding(
    sizes: Mapping[str, int], shares: Mapping[str, slice | tuple[slice, ...]], whole: bool
) -> Sharding:
    if not whole:
        return Sharding(0, sizes, {name: _slices(shares[name]) for name in sizes})
    pieces, start = [], 0
    for name, size in sizes.items():
        pieces += [slice(start + s.start, start + s.stop) for s in _slices(shares[name])]
        start += size
    return Sharding(0, {"": start}, {"": tuple(pieces)})


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
        shard: Features | None = None,
        share: slice | None = None,
    ) -> None:
        """`share`: this rank's features, of gate and of up."""
        sizes = {"gate": out_features, "up": out_features}
        shares = None if share is None else dict.fromkeys(sizes, share)
        super().__init__(
            in_features, sizes, build, bias=bias, shard=shard, shares=shares, whole=whole
        )

    def forward(
        self,
        x: torch.Tensor,
        *,
        norm: nn.Module | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[num_tokens, in_features] → [num_tokens, out_features]"""
        assert residual is None, "a gate has no residual"
        x, fused = before_product(x, norm, self.operations, "gated_linear", self.norm_sums)
        return self.operations.gated_linear(x, self.weight, self.bias, norm=fused)
