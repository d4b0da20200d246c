"""Arguments of operations, as `OperationsKit` and its parts compare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...core.nn.operations import CenteredNorm, Norm, Operations
from ...core.nn.quantized_weight import QuantizedWeight

REFERENCE = Operations()
TOKENS = (1, 2, 5, 33)
"""One and few tokens often have separate implementations."""
SIZE = 256


def wide(value: Any) -> Any:
    """Convert to float32; objects without numbers are returned unchanged."""
    if isinstance(value, QuantizedWeight):
        return value._replace(scale=value.scale.float())
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() and value.dtype.itemsize > 1 else value
    if isinstance(value, Norm):
        return Norm(value.weight.float(), value.eps)
    if isinstance(value, CenteredNorm):
        return value._replace(weight=wide(value.weight), bias=wide(value.bias))
    return value


def copied(value: Any) -> Any:
    """Copy the value, tensors included."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Norm):
        return Norm(value.weight.clone(), value.eps)
    if isinstance(value, CenteredNorm):
        return value._replace(weight=copied(value.weight), bias=copied(value.bias))
    if isinstance(value, QuantizedWeight):
        parts: dict[str, Any] = {name: part.clone() for name, part in value.tensors().items()}
        return value._replace(**parts)
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in an argument."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, QuantizedWeight):
        return list(value.tensors().values())
    return [value.weight] if isinstance(value, Norm) else []


def copied_all(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the arguments, tensors included."""
    return {key: copied(value) for key, value in arguments.items()}
