"""Norms as separate layers, and fused with the product after them.

Products take any norm as `norm=`: an RMSNorm, and a LayerNorm where operations say that they take
one, are passed to the operation, which may apply it in the same pass; every other norm is applied
before it (`before_product`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..parallel.sharding import Sharding
from .context import BuildContext
from .layer_operations.products import CenteredNorm, Norm, NormSums
from .operations import Operations

SUMMED_ROWS = 4096
"""Rows of a weight that are float32 at once while it is summed."""
NO_SUMS: Mapping[nn.Module, NormSums] = MappingProxyType({})


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32 inside."""

    def __init__(self, size: int, eps: float, build: BuildContext) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(build.empty(size))
        self.operations = build.operations

    @property
    def norm(self) -> Norm:
        """Return the parameters, for operations that apply the norm themselves."""
        return Norm(self.weight, self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] → [..., size]"""
        return self.operations.rms_norm(x, self.norm)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + norm(x): [num_tokens, size] → the same shape; `residual` may be overwritten"""
        return self.operations.add_rms_norm(x, self.norm, residual)


class OffsetRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight): checkpoints store the factors minus one, or another offset.

    Computed in float32, and rounded once: 16 bits cannot represent one plus a small number.
    """

    def __init__(self, size: int, eps: float, build: BuildContext, *, offset: float = 1.0) -> None:
        super().__init__(size, eps, build)
        self.offset = offset
        self.factor: torch.Tensor
        factor = torch.empty(size, device=build.device, dtype=torch.float32)
        self.register_buffer("factor", factor, persistent=False)

    def after_loading(self) -> None:
        """Compute the factors once the weight is loaded."""
        self.factor.copy_(self.weight.detach()).add_(self.offset)

    @property
    def norm(self) -> Norm:
        """Return the parameters with the factors as weight, always float32."""
        return Norm(self.factor, self.eps)


class ScaledRMSNorm(RMSNorm):
    """factor * x / rms(x) * weight, in float32 and rounded once: products after it take the factor
    with the norm."""

    def __init__(self, size: int, eps: float, build: BuildContext, *, factor: float) -> None:
        super().__init__(size, eps, build)
        self.factor = factor
        self.scaled: torch.Tensor
        scaled = torch.empty(size, device=build.device, dtype=torch.float32)
        self.register_buffer("scaled", scaled, persistent=False)

    def after_loading(self) -> None:
        """Scale the weight once it is loaded."""
        self.scaled.copy_(self.weight.detach()).mul_(self.factor)

    @property
    def norm(self) -> Norm:
        """Return the parameters with the scaled weight, always float32."""
        return Norm(self.scaled, self.eps)


class AllHeadsRMSNorm(RMSNorm):
    """One norm over heads that ranks divide: each adds up the squares of its own."""

    def __init__(
        self, heads: slice, num_heads: int, head_dim: int, eps: float, build: BuildContext
    ) -> None:
        """`heads`: this rank's; other ranks may have the same ones."""
        group, count = build.ranks.tensor, heads.stop - heads.start
        super().__init__(count * head_dim, eps, build)
        self.group, self.size = group, group.size * count * head_dim
        rows = slice(heads.start * head_dim, heads.stop * head_dim)
        self.shardings = {"weight": Sharding(0, {"": num_heads * head_dim}, {"": (rows,)})}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, heads * head_dim] → the same shape"""
        if self.group.size == 1:
            return super().forward(x)
        wide = x.float()
        squares = self.group.all_reduce(wide.square().sum(-1, keepdim=True))
        wide = wide * torch.rsqrt(squares / self.size + self.eps)
        return (self.weight * wide.to(self.weight.dtype)).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight, + bias if there is one, over the last dimension."""

    def __init__(self, size: int, eps: float, build: BuildContext, *, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(build.empty(size))
        self.bias = nn.Parameter(build.empty(size)) if bias else None
        self.operations = build.operations

    @property
    def norm(self) -> CenteredNorm:
        """Return the parameters, for operations that apply the norm themselves."""
        return CenteredNorm(self.weight, self.bias, self.eps)

    def sums(self, weight: torch.Tensor, bias: torch.Tensor | None) -> NormSums:
        """Return what the norm's parameters come to after a product with `weight`, [out_features,
        in_features], whose bias is `bias`, [out_features]."""
        offsets = None if bias is None else bias.float()
        if self.bias is not None:
            offset = _product(weight, self.bias)
            offsets = offset if offsets is None else offset + offsets
        return NormSums(_product(weight, self.weight), offsets)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] → [..., size]"""
        return self.operations.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + norm(x): [num_tokens, size] → the same shape"""
        return residual + self.operations.layer_norm(x, self.weight, self.bias, self.eps)


def _product(weight: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """[out_features, in_features], [in_features] → [out_features] float32"""
    wide = vector.float()
    return torch.cat([part.float() @ wide for part in weight.split(SUMMED_ROWS)])


class BiaslessLayerNorm(LayerNorm):
    """(x - mean) / deviation * weight: for families whose norms have no biases."""

    def __init__(self, size: int, eps: float, build: BuildContext) -> None:
        super().__init__(size, eps, build, bias=False)


def before_product(
    x: torch.Tensor,
    norm: nn.Module | None,
    operations: Operations | None = None,
    method: str = "linear",
    sums: Mapping[nn.Module, NormSums] = NO_SUMS,
) -> tuple[torch.Tensor, Any]:
    """Return a product's input, and the norm that the operation has to apply to it: an `AnyNorm`,
    or where no `operations` are given, a `Norm`.

    x: [num_tokens, size] → the same shape; method: that of `operations` that will get the norm;
    sums: of LayerNorms that this product expects.
    """
    if norm is None:
        return x, None
    if isinstance(norm, RMSNorm):
        return x, norm.norm
    takes = operations is not None and f"{method}.layer_norm" in operations.features
    if takes and isinstance(norm, LayerNorm):
        return x, norm.norm._replace(sums=sums.get(norm))
    return norm(x), None


RMS_EPS = ("rms_norm_eps", "norm_eps", "rms_norm_epsilon", "norm_epsilon")
LAYER_EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


def norm_eps(hf_config: object, norm: type[nn.Module]) -> float:
    """Return the configuration's eps for norms of this class, by the names that families use.

    Raises ConfigError if it has none.
    """
    names = LAYER_EPS if issubclass(norm, LayerNorm) else RMS_EPS
    for name in names:
        if (eps := getattr(hf_config, name, None)) is not None:
            return float(eps)
    raise ConfigError(
        f"model: config.json has no eps for {norm.__name__} ({' or '.join(names)})", param="model"
    )
