"""RoBERTa and XLM-RoBERTa: BERT with positions after the padding id, and another head."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.linear import Linear
from .bert import ENCODER_PARTS, ENCODER_SHARDS, BertModel


class RobertaModel(BertModel):
    weight_map: ClassVar[WeightMap] = WeightMap(
        stacked=ENCODER_SHARDS,
        prefixes={"roberta.": ""},
        parts=ENCODER_PARTS,
        ignored=("pooler.", "lm_head.", "embeddings.position_ids", "embeddings.token_type_ids"),
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.first_position = first_position(config.hf_config)

    @classmethod
    def context_length(cls, hf_config: Any) -> int:
        return int(hf_config.max_position_embeddings) - first_position(hf_config)

    def shifted(self, positions: torch.Tensor) -> torch.Tensor:
        return positions + self.first_position


class ClassificationHead(nn.Module):
    """out_proj(tanh(dense(state of the first token)))"""

    def __init__(self, size: int, num_labels: int, build: BuildContext) -> None:
        super().__init__()
        self.dense = Linear(size, size, build, bias=True)
        self.out_proj = Linear(size, num_labels, build, bias=True)

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out_proj(torch.tanh(self.dense(first)))
        return out


class RobertaForSequenceClassification(RobertaModel):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.classifier = ClassificationHead(config.hidden_size, config.hf_config.num_labels, build)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(pooled)
        return logits


class RobertaForTokenClassification(RobertaModel):
    classifies_tokens: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.classifier = Linear(config.hidden_size, config.hf_config.num_labels, build, bias=True)

    def classify(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(states)
        return logits


def first_position(hf_config: Any) -> int:
    """Return the first token's position: positions up to the padding id are reserved."""
    return int(hf_config.pad_token_id) + 1
