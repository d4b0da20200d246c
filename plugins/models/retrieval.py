"""Models that compare texts and pictures by the vectors of their tokens (ColBERT, ColPali)."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.linear import Linear
from .decoder import HeadlessLM
from .gemma import GemmaModel
from .qwen2 import Qwen2Model


class VectorPerToken(HeadlessLM):
    """With the layer that makes the vectors."""

    embeds_tokens: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        size = int(config.whole_config.embedding_dim)
        self.embedding_proj_layer = Linear(config.hidden_size, size, build, bias=True)

    def token_vectors(self, states: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.embedding_proj_layer(states)
        return vectors


class ColPaliTextModel(VectorPerToken, GemmaModel):
    """The text part of ColPali."""


class ColQwen2TextModel(VectorPerToken, Qwen2Model):
    """The text part of ColQwen2."""
