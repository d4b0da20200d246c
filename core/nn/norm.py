"""RMSNorm, with the residual addition folded in."""

from __future__ import annotations

import torch
from torch import nn

from .context import BuildContext


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32 inside."""

    def __init__(self, size: int, eps: float, build: BuildContext) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(build.empty(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] → [..., size]"""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """→ (norm(x + residual), x + residual)"""
        residual = x + residual
        return self(residual), residual
