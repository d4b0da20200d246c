"""The contract of weight loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..config import EngineConfig
    from ..loading.model_config import ModelConfig


class WeightLoader(Protocol):
    """Fills a model from a checkpoint, which it does not modify."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None: ...

    def load(self, model: nn.Module, device: torch.device) -> None:
        """Fill every parameter of `model`, and process each of its quantized layers
        (`core.loading.weight_map.ParameterFiller` does both, from named tensors).

        In place, in each parameter's type; the same checkpoint gives the same numbers each time.
        Raises LoadError naming the tensor that is missing, unknown or of another shape, and for
        files that are damaged or missing.
        """
