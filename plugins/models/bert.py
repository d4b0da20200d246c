"""BERT: an encoder whose norms come after the sums, pooled to vectors or classified."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard, WeightMap
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.embedding import Embedding
from ...core.nn.encoder import BidirectionalAttention
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.mlp import PlainMLP
from ...core.nn.norm import LayerNorm
from ...core.nn.ragged import RaggedRows
from ...core.parallel.sharding import HeadShare
from .encoder_classifiers import SequenceClassifier, TokenClassifier

ENCODER_PARTS = {
    "gamma": "weight",
    "beta": "bias",
    "encoder.layer": "layers",
    "attention.self": "attention",
    "attention.output.dense": "attention.dense",
    "attention.output.LayerNorm": "attention.norm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "norm",
    "LayerNorm": "norm",
}
ENCODER_SHARDS = {
    "query": Shard("qkv_proj", "q"),
    "key": Shard("qkv_proj", "k"),
    "value": Shard("qkv_proj", "v"),
}


class Embeddings(nn.Module):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        self.word_embeddings = Embedding(
            config.vocab_size, hf.hidden_size, build, shard="vocabulary"
        )
        self.position_embeddings = Embedding(hf.max_position_embeddings, hf.hidden_size, build)
        self.token_type_embeddings = Embedding(hf.type_vocab_size, hf.hidden_size, build)
        self.norm = LayerNorm(hf.hidden_size, hf.layer_norm_eps, build)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, token_type_ids: torch.Tensor | None
    ) -> torch.Tensor:
        types = self.token_type_embeddings
        kinds = types.weight[0] if token_type_ids is None else types(token_type_ids)
        summed = self.word_embeddings(input_ids) + kinds + self.position_embeddings(positions)
        out: torch.Tensor = self.norm(summed)
        return out


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        size, heads, self.ranks = hf.hidden_size, config.num_heads, build.ranks
        own = HeadShare.of(heads, heads, build.ranks.tensor)
        sizes = {"q": size, "k": size, "v": size}
        self.qkv_proj = MergedLinear(
            size, sizes, build, bias=True, shard="out", shares=own.rows(size // heads)
        )
        self.attention = BidirectionalAttention(own.num_heads, size // heads, build)
        self.dense = Linear(size, size, build, bias=True, shard="in")
        self.norm = LayerNorm(size, hf.layer_norm_eps, build)

    def forward(self, hidden: torch.Tensor, rows: RaggedRows) -> torch.Tensor:
        heads = self.attention(self.qkv_proj(hidden), rows)
        out: torch.Tensor = self.norm(self.ranks.add(hidden, (self.dense, heads)))
        return out


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        self.attention = SelfAttention(config, build)
        self.mlp = PlainMLP(hf.hidden_size, hf.intermediate_size, hf.hidden_act, build)
        self.norm = LayerNorm(hf.hidden_size, hf.layer_norm_eps, build)

    def forward(self, hidden: torch.Tensor, rows: RaggedRows) -> torch.Tensor:
        hidden = self.attention(hidden, rows)
        out: torch.Tensor = self.norm(self.mlp(hidden))
        return out


class BertModel(nn.Module):
    tensor_parallel = True
    causal: ClassVar[bool] = False
    pooling_type: ClassVar[Literal["CLS", "LAST", "MEAN"]] = "CLS"
    weight_map: ClassVar[WeightMap] = WeightMap(
        stacked=ENCODER_SHARDS,
        prefixes={"bert.": ""},
        parts=ENCODER_PARTS,
        ignored=("pooler.", "cls.", "embeddings.position_ids"),
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        _refuse_variants(config.hf_config)
        self.embeddings = Embeddings(config, build)
        self.layers = nn.ModuleList(Layer(config, build) for _ in range(config.num_layers))

    @classmethod
    def context_length(cls, hf_config: Any) -> int:
        return int(hf_config.max_position_embeddings)

    def shifted(self, positions: torch.Tensor) -> torch.Tensor:
        """Position → its row in the table; both [num_tokens]."""
        return positions

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        rows = RaggedRows.of(context.layout.query_start_cpu, input_ids.device)
        hidden: torch.Tensor = self.embeddings(
            input_ids, self.shifted(context.positions), context.token_type_ids
        )
        for layer in self.layers:
            hidden = layer(hidden, rows)
        return hidden

    def pooling_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class BertForSequenceClassification(SequenceClassifier, BertModel):
    pass


class BertForTokenClassification(TokenClassifier, BertModel):
    pass


def _refuse_variants(hf: Any) -> None:
    kind = getattr(hf, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        raise ConfigError(
            f"position_embedding_type: {kind!r} is not supported, only absolute",
            param="position_embedding_type",
        )
    if getattr(hf, "is_decoder", False):
        raise ConfigError("is_decoder: this architecture runs as an encoder", param="is_decoder")
