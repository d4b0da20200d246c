"""Activations: by the names that configurations use, and those of experts, of gate and up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from ..errors import ConfigError

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


def activation_named(
    name: str, *, field: str = "hidden_act"
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation of this name. `field`: the configuration's field that has the name.

    Raises ConfigError for a name that is not in ACTIVATIONS."""
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{field}: {name!r} is not supported (there are: {', '.join(ACTIVATIONS)})",
            param=field,
        )
    return ACTIVATIONS[name]


class ClampedSwiGLU(NamedTuple):
    """(min(max(up, -limit), limit) + 1) * gate * sigmoid(alpha * gate), with gate at most limit.

    Source: GPT-OSS's model card (arXiv 2508.10925) and published code.
    """

    alpha: float
    limit: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """[any] both → the same shape"""
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


class LimitedSwiGLU(NamedTuple):
    """min(silu(gate), limit) * min(max(up, -limit), limit).

    Source: the published code of Step 3.5.
    """

    limit: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """[any] both → the same shape"""
        return F.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


ExpertActivation: TypeAlias = ClampedSwiGLU | LimitedSwiGLU | Literal["gelu", "relu2"]
"""Of experts, in place of silu(gate) * up; "gelu": gelu(gate) * up, gelu by its tanh approximation;
"relu2": relu(up)², of experts without gates."""
