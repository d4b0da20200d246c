"""Classifiers over encoders, as base classes before the encoder's own."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.linear import Linear


class Pooler(nn.Module):
    """tanh(dense(state of the first token))."""

    def __init__(self, size: int, build: BuildContext) -> None:
        super().__init__()
        self.dense = Linear(size, size, build, bias=True)

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(first))


class SequenceClassifier:
    """A classifier of the first token's state."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)  # type: ignore[call-arg]
        self.pooler = Pooler(config.hidden_size, build)
        self.classifier = Linear(config.hidden_size, config.hf_config.num_labels, build, bias=True)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.pooler(pooled))
        return logits


class TokenClassifier:
    """A classifier of each token's state."""

    classifies_tokens: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)  # type: ignore[call-arg]
        self.classifier = Linear(config.hidden_size, config.hf_config.num_labels, build, bias=True)

    def classify(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(states)
        return logits
