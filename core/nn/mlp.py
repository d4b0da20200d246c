"""The gated MLP: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import ConfigError
from .context import BuildContext
from .linear import Linear, MergedLinear


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
    ) -> None:
        super().__init__()
        if activation not in ("silu", "swish"):
            raise ConfigError(f"hidden_act: {activation!r} is not supported", param="hidden_act")
        sizes = {"gate": intermediate_size, "up": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, sizes, build, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, build, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] → the same shape."""
        gate, up = self.gate_up_proj.split(self.gate_up_proj(x))
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]
