"""What encoders are made of: attention in both directions without a cache, and the plain MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import ConfigError
from .context import BuildContext
from .linear import Linear
from .operations import HeadLayout, split_heads
from .ragged import RaggedRows

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""By the names that configurations use."""


class BidirectionalAttention(nn.Module):
    """Every token of a row sees every other one. It has no parameters and no cache."""

    def __init__(self, num_heads: int, head_dim: int, build: BuildContext) -> None:
        super().__init__()
        self.layout = HeadLayout(num_heads, num_heads, head_dim)
        self.scale = head_dim**-0.5
        self.operations = build.operations

    def forward(self, qkv: torch.Tensor, rows: RaggedRows) -> torch.Tensor:
        """[num_tokens, 3 * num_heads * head_dim] → [num_tokens, num_heads * head_dim]"""
        heads = split_heads(qkv, self.layout)
        out = self.operations.bidirectional_attention(*heads, rows, self.scale)
        return out.flatten(1)


class PlainMLP(nn.Module):
    """down(activation(up(x))), with biases."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, build: BuildContext
    ) -> None:
        super().__init__()
        self.activation = activation_named(activation)
        self.up_proj = Linear(hidden_size, intermediate_size, build, bias=True)
        self.down_proj = Linear(intermediate_size, hidden_size, build, bias=True)

    def forward(self, x: torch.Tensor, *, residual: torch.Tensor) -> torch.Tensor:
        """residual + mlp(x): [num_tokens, hidden_size] → the same shape."""
        out: torch.Tensor = self.down_proj(self.activation(self.up_proj(x)), residual=residual)
        return out


def activation_named(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Raises ConfigError for one that is not in ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"hidden_act: {name!r} is not supported (there are: {', '.join(ACTIVATIONS)})",
            param="hidden_act",
        )
    return ACTIVATIONS[name]
