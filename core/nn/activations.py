"""Activations by the names that configurations use."""

from __future__ import annotations

from collections.abc import Callable

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
