"""Norms as layers of their own; RMSNorm also on the way into a product."""

from __future__ import annotations

import torch
from torch import nn

from .context import BuildContext
from .operations import Norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32 inside."""

    def __init__(self, size: int, eps: float, build: BuildContext) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(build.empty(size))
        self.operations = build.operations

    @property
    def norm(self) -> Norm:
        """For operations that apply it themselves."""
        return Norm(self.weight, self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] → [..., size]"""
        return self.operations.rms_norm(x, self.norm)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + norm(x): [num_tokens, size] → the same shape; `residual` may be overwritten"""
        return self.operations.add_rms_norm(x, self.norm, residual)


class OffsetRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight): checkpoints store how far from one the factors are.

    All of it in float32, and rounded once: one plus a small number has no room in 16 bits.
    """

    def __init__(self, size: int, eps: float, build: BuildContext) -> None:
        super().__init__(size, eps, build)
        self.factor: torch.Tensor
        factor = torch.empty(size, device=build.device, dtype=torch.float32)
        self.register_buffer("factor", factor, persistent=False)

    def after_loading(self) -> None:
        """The weight is there."""
        self.factor.copy_(self.weight.detach()).add_(1.0)

    @property
    def norm(self) -> Norm:
        """With the factors as weight, float32 whatever the model's type."""
        return Norm(self.factor, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias over the last dimension."""

    def __init__(self, size: int, eps: float, build: BuildContext) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(build.empty(size))
        self.bias = nn.Parameter(build.empty(size))
        self.operations = build.operations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] → [..., size]"""
        return self.operations.layer_norm(x, self.weight, self.bias, self.eps)
