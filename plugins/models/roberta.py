"""RoBERTa and XLM-RoBERTa: BERT with positions after the padding id, and another head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.errors import LoadError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.linear import Linear
from ..loaders.pt import read_tensors
from .bert import ENCODER_PARTS, ENCODER_SHARDS, BertModel
from .encoder_classifiers import TokenClassifier


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


class RobertaForTokenClassification(TokenClassifier, RobertaModel):
    pass


class BgeM3EmbeddingModel(RobertaModel):
    """BGE-M3: XLM-RoBERTa with a vector of the text, vectors of its tokens (ColBERT's), and the
    weights of tokens in a sparse vector.
    """

    classifies_tokens: ClassVar[bool] = True
    embeds: ClassVar[bool] = True
    num_labels: ClassVar[int] = 1
    activates: ClassVar[bool] = False
    weight_map: ClassVar[WeightMap] = replace(
        RobertaModel.weight_map,
        optional=tuple(
            f"{name}.{part}"
            for name in ("colbert_linear", "sparse_linear")
            for part in ("weight", "bias")
        ),
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        hf = config.hf_config
        self.folder = config.path
        self.marks = (hf.bos_token_id, hf.eos_token_id)
        self.colbert_linear = Linear(config.hidden_size, config.hidden_size, build, bias=True)
        self.sparse_linear = Linear(config.hidden_size, 1, build, bias=True)

    def after_loading(self) -> None:
        """Read the two layers from their own files, as they are published."""
        absent = getattr(self, "absent", frozenset[str]())
        for name, parameter in self.named_parameters():
            if name not in absent:
                continue
            layer, _, part = name.partition(".")
            file = self.folder / f"{layer}.pt"
            tensors = read_tensors(file) if file.is_file() else {}
            if tuple(tensors.get(part, parameter[:0]).shape) != tuple(parameter.shape):
                raise LoadError(f"model: {file} has no {part} of shape {tuple(parameter.shape)}")
            parameter.data.copy_(tensors[part])

    def token_vectors(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.colbert_linear(states)
        return out

    def classify(self, states: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] → weights [num_tokens, 1], at least 0"""
        return torch.relu(self.sparse_linear(states))

    def result_tokens(self, task: str, token_ids: Sequence[int]) -> slice:
        """Leave out the token that begins the text, and of weights the one that ends it."""
        first, last = self.marks
        begin = int(token_ids[0] == first)
        ends = task == "token_classify" and len(token_ids) > begin and token_ids[-1] == last
        return slice(begin, len(token_ids) - ends)


def first_position(hf_config: Any) -> int:
    """Return the first token's position: positions up to the padding id are reserved."""
    return int(hf_config.pad_token_id) + 1
