"""Embeddings, norms, products and activations: a part of `Operations`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from ...old_names import RenamedMethod
from ..activations import ACTIVATIONS
from ..quantized_weight import QuantizedWeight, dequantize


class Norm(NamedTuple):
    """An RMSNorm's parameters, for operations that apply it to their input."""

    weight: torch.Tensor
    """[size], of x's type or float32"""
    eps: float


class NormSums(NamedTuple):
    """What a LayerNorm's parameters come to after a product with W, both [out_features] float32:
    norm(x) Wᵀ + b = ((x * weight) Wᵀ - mean * factors) / deviation + offsets."""

    factors: torch.Tensor
    """W times the norm's weight."""
    offsets: torch.Tensor | None
    """W times its bias, and the product's bias b; None: there is neither."""


class CenteredNorm(NamedTuple):
    """A LayerNorm's parameters, likewise."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    sums: NormSums | None = None
    """Of the product that gets the norm, which may take the mean of x while it multiplies; None:
    they are not known. Operations get them that have the feature `linear.norm_sums`."""


AnyNorm: TypeAlias = Norm | CenteredNorm
"""Of operations with the feature `layer_norm`; others get a `Norm`."""


class PositionRows(NamedTuple):
    """Vectors of positions, learned or computed, for `Operations.embed` to add."""

    positions: torch.Tensor
    """[T] int64"""
    weight: torch.Tensor
    """[num_positions, hidden_size]"""


def with_positions(
    rows: torch.Tensor, factor: float, positions: PositionRows | None
) -> torch.Tensor:
    """factor * rows, rounded, plus the rows of the positions: [T, hidden_size] → the same shape."""
    if factor != 1.0:
        rows = rows * factor
    return rows if positions is None else rows + F.embedding(*positions)


class ProductOperations:
    """T tokens. Weights are [out_features, in_features]."""

    def embed(
        self,
        token_ids: torch.Tensor,
        weight: torch.Tensor,
        *,
        factor: float = 1.0,
        positions: PositionRows | None = None,
    ) -> torch.Tensor:
        """factor * weight[token_ids], rounded, plus the rows of the positions: [T] int64 → [T,
        hidden_size], of the weight's type."""
        return with_positions(F.embedding(token_ids, weight), factor, positions)

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """[..., size] → x / rms(x), rounded to the weight's type, times the weight; of x's type."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        return (norm.weight * wide.to(norm.weight.dtype)).to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, norm: Norm, residual: torch.Tensor) -> torch.Tensor:
        """residual + norm(x): [T, size] → the same shape. `residual` may be overwritten."""
        return residual + self.rms_norm(x, norm)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """(x - mean) / deviation * weight + bias over the last dimension, [..., size]."""
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def normed(self, x: torch.Tensor, norm: AnyNorm) -> torch.Tensor:
        """Apply either norm: [..., size] → the same shape."""
        if isinstance(norm, CenteredNorm):
            return self.layer_norm(x, norm.weight, norm.bias, norm.eps)
        return self.rms_norm(x, norm)

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x Wᵀ + bias, of which the other products are made: [T, in_features] → [T, out_features],
        in memory of its own."""
        return F.linear(x, weight, bias)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: AnyNorm | None = None,
        residual: torch.Tensor | None = None,
        factor: float = 1.0,
    ) -> torch.Tensor:
        """residual + factor * (norm(x) Wᵀ + bias): [T, in_features] → [T, out_features].

        `residual` may be overwritten: use the returned tensor. Only models that have a factor pass
        it (`features`).
        """
        if norm is not None:
            x = self.normed(x, norm)
        out = self.product(x, weight, bias)
        if residual is not None:
            return torch.add(residual, out, alpha=factor)
        return out if factor == 1.0 else out.mul_(factor)

    def normed_linear(
        self, x: torch.Tensor, norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return norm(x), [T, in_features], which others read, too, and norm(x) Wᵀ + bias, [T,
        out_features], in the weight's type, which may be float32 where x is not."""
        x = self.rms_norm(x, norm)
        return x, self.linear(x.to(weight.dtype), weight, bias)

    def activated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        activation: str,
        norm: AnyNorm | None = None,
    ) -> torch.Tensor:
        """activation(norm(x) Wᵀ + bias), by its name in `ACTIVATIONS`: [T, in_features] → [T,
        out_features]."""
        return self.pointwise(ACTIVATIONS[activation], self.linear(x, weight, bias, norm=norm))

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: AnyNorm | None = None,
    ) -> torch.Tensor:
        """silu(gate) * up of one product, gate's rows first: [T, in_features] → [T, out / 2]."""
        return self.silu_mul(self.linear(x, weight, bias, norm=norm))

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 * size], gate then up → [T, size]"""
        gate, up = x.chunk(2, dim=-1)
        return self.pointwise(F.silu, gate) * up

    def gelu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """As `silu_mul`, with gelu by its tanh approximation (arXiv 1606.08415)."""
        gate, up = x.chunk(2, dim=-1)
        return self.pointwise(ACTIVATIONS["gelu_pytorch_tanh"], gate) * up

    def sigmoid_gate(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x * sigmoid(gate), both [T, size]; with weight, [1, width], the gate, [T, width], times
        it is the logit of a whole row."""
        logits = gate if weight is None else self.product(gate, weight)
        return x * self.pointwise(torch.sigmoid, logits)

    def pointwise(
        self, function: Callable[..., torch.Tensor], *parts: torch.Tensor
    ) -> torch.Tensor:
        """`function`, of torch, which computes each number by itself: parts [T, any], which it may
        overwrite → [T, any]. For functions whose last bits depend on a number's place in memory, as
        exponentials' do on a CPU."""
        return function(*parts)

    def xielu(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Apply xIELU (arXiv 2411.13010): [any] → the same shape. weights: [4] float32: of x² above
        0, of expm1(min(x, eps)) - x elsewhere, of x everywhere, and eps."""
        above, below, beta, eps = weights.unbind()
        wide = x.float()
        low = self.pointwise(torch.expm1, torch.minimum(wide, eps)) - wide
        return (beta * wide + torch.where(wide > 0, above * wide * wide, below * low)).to(x.dtype)

    def quantized_linear(
        self,
        x: torch.Tensor,
        weight: QuantizedWeight,
        bias: torch.Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """`linear`, or with `gated` `gated_linear`, with a quantized weight.

        The reference dequantises the weight each time, and never rounds inputs.
        """
        dense = dequantize(weight, x.dtype)
        if gated:
            assert residual is None, "a gate has no residual"
            return self.gated_linear(x, dense, bias, norm=norm)
        return self.linear(x, dense, bias, norm=norm, residual=residual)

    packed_linear = RenamedMethod("quantized_linear")
