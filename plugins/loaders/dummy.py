"""Random weights on the device: real shapes and speed without a checkpoint."""

from __future__ import annotations

import torch
from torch import nn

from ...core.config import EngineConfig
from ...core.loading.model_config import ModelConfig
from ...core.loading.quantize import quantized_layers
from ...core.loading.tensors.staging import Staging
from .files import Bar


class DummyLoader:
    """Matrices uniform and small, norms at one, biases at zero."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        self.seed = config.seed

    def load(self, model: nn.Module, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(self.seed)
        parameters = dict(model.named_parameters())
        layers = quantized_layers(model)
        sizes = {name: layer.spec.out_features * layer.spec.in_features
                 for name, layer in layers.items()}  # fmt: skip
        with Bar(sum(p.nbytes for p in parameters.values()) + sum(sizes.values())) as bar:
            for name, parameter in parameters.items():
                data = parameter.data
                if name.endswith("bias"):
                    data.zero_()
                elif data.dim() < 2:
                    data.fill_(1.0)
                else:
                    bound = (3.0 / data.shape[-1]) ** 0.5
                    data.uniform_(-bound, bound, generator=generator)
                bar.add(data.nbytes)
            for name, layer in layers.items():
                Staging(layer).fill_dummy(generator)
                bar.add(sizes[name])
