"""Linear layers after pooling: sentence-transformers' Dense modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..errors import LoadError
from ..nn.activations import ACTIVATIONS
from .sentence_transformer import Projection


class Projections(nn.Module):
    """activation(W x + b) in sequence, in float32, on a row per prompt."""

    def __init__(self, specs: Sequence[Projection], device: torch.device) -> None:
        """Raises LoadError for a missing or wrong file."""
        super().__init__()
        self.specs = tuple(specs)
        self.tensors = [_load(spec, device) for spec in specs]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, in_features of the first] → [num_rows, out_features of the last], float32"""
        for spec, (weight, bias) in zip(self.specs, self.tensors, strict=True):
            x = F.linear(x, weight, bias)
            if spec.activation is not None:
                x = ACTIVATIONS[spec.activation](x)
        return x


def _load(spec: Projection, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    file = spec.folder / "model.safetensors"
    try:
        tensors = load_file(file, device=str(device))
    except (OSError, SafetensorError) as error:
        raise LoadError(f"{file} cannot be read: {error}") from error
    expected = {"linear.weight": (spec.out_features, spec.in_features)}
    if spec.bias:
        expected["linear.bias"] = (spec.out_features,)  # type: ignore[assignment]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != expected:
        raise LoadError(f"{file} holds {shapes}, its config.json says {expected}")
    bias = tensors["linear.bias"].float() if spec.bias else None
    return tensors["linear.weight"].float(), bias
