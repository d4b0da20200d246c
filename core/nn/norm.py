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
