"""The gated MLP: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import ConfigError
from .context import BuildContext
from .linear import GatedLinear, Linear
from .norm import RMSNorm


class GatedMLP(nn.Module):
    """Gate and up in one product."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        build: BuildContext,
        *,
        bias: bool = False,
        whole: bool = False,
    ) -> None:
        """`whole`: the checkpoint has gate and up as one tensor."""
        super().__init__()
        if activation not in ("silu", "swish"):
            raise ConfigError(f"hidden_act: {activation!r} is not supported", param="hidden_act")
        self.gate_up_proj = GatedLinear(
            hidden_size, intermediate_size, build, bias=bias, whole=whole
        )
        self.down_proj = Linear(intermediate_size, hidden_size, build, bias=bias)

    def forward(self, hidden: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """hidden + mlp(norm(hidden)): [num_tokens, hidden_size] → the same shape."""
        out: torch.Tensor = self.down_proj(self.inner(hidden, norm), residual=hidden)
        return out

    def inner(self, hidden: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        """activation(gate) * up of norm(hidden): → [num_tokens, intermediate_size]"""
        inner: torch.Tensor = self.gate_up_proj(hidden, norm=norm)
        return inner
