"""Per-layer inputs beside the hidden states: of Gemma 3n, and of the smaller Gemma 4 models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.activations import ACTIVATIONS
from ...core.nn.context import BuildContext
from ...core.nn.embedding import Embedding
from ...core.nn.linear import Linear
from ...core.nn.norm import RMSNorm

PER_LAYER_NAMES = {
    "per_layer_inputs.embedding": "embed_tokens_per_layer",
    "per_layer_inputs.projection": "per_layer_model_projection",
    "per_layer_inputs.norm": "per_layer_projection_norm",
    "per_layer_input.gate": "per_layer_input_gate",
    "per_layer_input.projection": "per_layer_projection",
    "per_layer_input.norm": "post_per_layer_input_norm",
}


def input_size(hf: Any) -> int:
    """Return the width of per-layer inputs; 0: none."""
    return int(getattr(hf, "hidden_size_per_layer_input", None) or 0)


class PerLayerInputs(nn.Module):
    """Makes all layers' inputs: per-layer embeddings of each token, plus a projection of its hidden
    states.
    """

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        self.size = input_size(hf)
        width, self.known = config.num_layers * self.size, hf.vocab_size_per_layer_input
        """Larger token ids have the inputs of token 0."""
        self.embedding = Embedding(self.known, width, build)
        self.projection = Linear(hf.hidden_size, width, build)
        self.norm = RMSNorm(self.size, hf.rms_norm_eps, build)
        self.scale = float(torch.tensor(self.size**0.5).to(build.dtype))

    def forward(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """input_ids: [num_tokens], hidden: their embeddings → [num_tokens, num_layers, size]"""
        shape = len(hidden), -1, self.size
        states = self.projection(hidden) * hidden.shape[-1] ** -0.5
        known = torch.where(input_ids < self.known, input_ids, 0)
        tokens = self.embedding(known) * self.scale
        states = self.norm(states.view(shape))
        inputs: torch.Tensor = (states + tokens.view(shape)) * 2**-0.5
        return inputs


class PerLayerInput(nn.Module):
    """Adds a layer's own input, gated by the hidden states."""

    def __init__(self, hf: Any, build: BuildContext) -> None:
        super().__init__()
        size = input_size(hf)
        self.operations = build.operations
        self.gate = Linear(hf.hidden_size, size, build)
        self.projection = Linear(size, hf.hidden_size, build)
        self.norm = RMSNorm(hf.hidden_size, hf.rms_norm_eps, build)

    def forward(
        self, hidden: torch.Tensor, inputs: torch.Tensor, *, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """hidden: [num_tokens, hidden_size], inputs: [num_tokens, size] → as hidden, added to
        `residual` if given.
        """
        gate = self.operations.pointwise(ACTIVATIONS["gelu_pytorch_tanh"], self.gate(hidden))
        projected = self.projection(gate * inputs)
        out: torch.Tensor
        out = self.norm(projected) if residual is None else self.norm.add(projected, residual)
        return out
