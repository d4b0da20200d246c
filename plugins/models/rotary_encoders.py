"""Encoders that rotate queries and keys: ModernBERT, with windows and norms before its parts, and
NomicBERT and GTE, with norms after the sums. Each has a gated MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard, WeightMap
from ...core.nn.activations import activation_named
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.embedding import Embedding
from ...core.nn.encoder import BidirectionalAttention
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.norm import LayerNorm
from ...core.nn.ragged import RaggedRows
from ...core.nn.rotary import Rotary
from .decoder import rope_of_type
from .encoder_classifiers import SequenceClassifier, TokenClassifier
from .t5 import FEATURE

PROJECTIONS = {
    "q_proj": Shard("qkv_proj", "q"),
    "k_proj": Shard("qkv_proj", "k"),
    "v_proj": Shard("qkv_proj", "v"),
    "gate_proj": Shard("gate_up_proj", "gate"),
    "up_proj": Shard("gate_up_proj", "up"),
}


@dataclass(frozen=True)
class WholeProjections(WeightMap):
    """Of checkpoints that may have several projections as one tensor."""

    wholes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Dotted part of a renamed checkpoint name → the projections in it, equally large."""

    def pieces(
        self, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, str | None, torch.Tensor]]:
        renamed = self.renamed(name)
        for whole, parts in self.wholes.items():
            if f".{whole}." in renamed:
                for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True):
                    yield *self.target(renamed.replace(whole, part)), rows
                return
        yield from super().pieces(name, tensor)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, build: BuildContext, *, bias: bool) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        inner = heads * config.head_dim
        self.qkv_proj = MergedLinear(size, {"q": inner, "k": inner, "v": inner}, build, bias=bias)
        self.attention = BidirectionalAttention(heads, config.head_dim, build)
        self.o_proj = Linear(inner, size, build, bias=bias)

    def forward(
        self,
        hidden: torch.Tensor,
        rows: RaggedRows,
        cos_sin: torch.Tensor,
        window: torch.Tensor | None,
    ) -> torch.Tensor:
        heads = self.attention(self.qkv_proj(hidden), rows, cos_sin=cos_sin, distance_bias=window)
        out: torch.Tensor = self.o_proj(heads)
        return out


class GatedUnit(nn.Module):
    """down(activation(gate(x)) * up(x))"""

    def __init__(
        self, config: ModelConfig, build: BuildContext, *, bias: bool, down_bias: bool
    ) -> None:
        super().__init__()
        hf = config.hf_config
        size, inner = config.hidden_size, hf.intermediate_size
        self.gate_up_proj = MergedLinear(size, {"gate": inner, "up": inner}, build, bias=bias)
        name = "hidden_activation" if hasattr(hf, "hidden_activation") else "hidden_act"
        self.activation = activation_named(getattr(hf, name), field=name)
        self.down_proj = Linear(inner, size, build, bias=down_bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(self.activation(gate) * up)
        return out


class Layer(nn.Module):
    """The norms come after the sums."""

    def __init__(
        self, config: ModelConfig, build: BuildContext, *, bias: bool, down_bias: bool
    ) -> None:
        super().__init__()
        eps = config.hf_config.layer_norm_eps
        self.self_attn = Attention(config, build, bias=bias)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, eps, build)
        self.mlp = GatedUnit(config, build, bias=False, down_bias=down_bias)
        self.post_mlp_layernorm = LayerNorm(config.hidden_size, eps, build)

    def forward(
        self, hidden: torch.Tensor, rows: RaggedRows, cos_sin: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.post_attention_layernorm(hidden + self.self_attn(hidden, rows, cos_sin, None))
        out: torch.Tensor = self.post_mlp_layernorm(hidden + self.mlp(hidden))
        return out


class Embeddings(nn.Module):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        self.word_embeddings = Embedding(config.vocab_size, config.hidden_size, build)
        self.token_type_embeddings: Embedding | None = None
        if hf.type_vocab_size:
            self.token_type_embeddings = Embedding(hf.type_vocab_size, config.hidden_size, build)
        self.LayerNorm = LayerNorm(config.hidden_size, hf.layer_norm_eps, build)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None) -> torch.Tensor:
        hidden, types = self.word_embeddings(input_ids), self.token_type_embeddings
        if types is not None:
            hidden = hidden + (types.weight[0] if token_type_ids is None else types(token_type_ids))
        out: torch.Tensor = self.LayerNorm(hidden)
        return out


class RotaryEncoder(nn.Module):
    """NomicBERT's and GTE's encoder."""

    causal: ClassVar[bool] = False
    bias: ClassVar[bool]
    """Whether projections of attention have one."""
    down_bias: ClassVar[bool]
    """Whether the MLP's last layer has one."""
    weight_map: ClassVar[WeightMap]

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        self.rotary = Rotary(config, build)
        self.embeddings = Embeddings(config, build)
        self.layers = nn.ModuleList(
            Layer(config, build, bias=self.bias, down_bias=self.down_bias)
            for _ in range(config.num_layers)
        )

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        rows = RaggedRows.of(context.layout.query_start_cpu, input_ids.device)
        cos_sin = self.rotary.cos_sin[context.positions][:, None]
        hidden: torch.Tensor = self.embeddings(input_ids, context.token_type_ids)
        for layer in self.layers:
            hidden = layer(hidden, rows, cos_sin)
        return hidden

    def pooling_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


# ---------------------------------------------------------------- NomicBERT


class NomicBertModel(RotaryEncoder):
    bias = down_bias = False
    pooling_type: ClassVar[Literal["CLS", "LAST", "MEAN"]] = "CLS"
    weight_map = WholeProjections(
        stacked=PROJECTIONS,
        prefixes={"nomic_bert.": ""},
        # The published checkpoints' names, and those of `transformers`.
        parts={
            "encoder.layers": "layers", "emb_ln": "embeddings.LayerNorm", "attn.out_proj":
            "self_attn.o_proj", "attn.Wqkv": "self_attn.Wqkv", "fc11": "up_proj",
            "fc12": "gate_proj", "fc2": "down_proj", "norm1": "post_attention_layernorm",
            "norm2": "post_mlp_layernorm",
        },
        wholes={"Wqkv": ("q_proj", "k_proj", "v_proj")},
        ignored=("pooler.", "cls."),
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf = config.hf_config
        for old, new in (("n_embd", "hidden_size"), ("n_layer", "num_hidden_layers")):
            if getattr(hf, old, None) not in (None, getattr(hf, new)):
                raise ConfigError(
                    f"{old}: an older form of config.json; set {new}: "
                    f"--hf-overrides '{{\"{new}\": {getattr(hf, old)}}}'",
                    param=old,
                )
        if getattr(hf, "moe_every_n_layers", 0):
            raise ConfigError(
                "moe_every_n_layers: a NomicBERT with experts is not supported",
                param="moe_every_n_layers",
            )
        super().__init__(config, build)


class NomicBertForSequenceClassification(SequenceClassifier, NomicBertModel):
    pass


class NomicBertForTokenClassification(TokenClassifier, NomicBertModel):
    pass


# ---------------------------------------------------------------- GTE


class GteModel(RotaryEncoder):
    bias = down_bias = True
    pooling_type: ClassVar[Literal["CLS", "LAST", "MEAN"]] = "CLS"
    weight_map = WholeProjections(
        stacked=PROJECTIONS,
        prefixes={"gte.": "", "new.": ""},
        parts={
            "encoder.layer": "layers", "attention.o_proj": "self_attn.o_proj",
            "attention.qkv_proj": "self_attn.Wqkv", "attn_ln": "post_attention_layernorm",
            "mlp_ln": "post_mlp_layernorm",
        },
        wholes={
            "Wqkv": ("q_proj", "k_proj", "v_proj"), "up_gate_proj": ("up_proj", "gate_proj"),
        },
        ignored=("pooler.", "lm_head."),
    )  # fmt: skip


class GteForSequenceClassification(SequenceClassifier, GteModel):
    pass


class GteForTokenClassification(TokenClassifier, GteModel):
    pass


# ---------------------------------------------------------------- ModernBERT


class ModernEmbeddings(nn.Module):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        self.tok_embeddings = Embedding(config.vocab_size, config.hidden_size, build)
        self.norm = LayerNorm(config.hidden_size, hf.norm_eps, build, bias=hf.norm_bias)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.tok_embeddings(input_ids))
        return out


class ModernLayer(nn.Module):
    """The norms come before attention, but the first layer's, and before the MLP."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        self.attn_norm: nn.Module = nn.Identity()
        if layer:
            self.attn_norm = LayerNorm(config.hidden_size, hf.norm_eps, build, bias=hf.norm_bias)
        self.attn = Attention(config, build, bias=hf.attention_bias)
        self.mlp_norm = LayerNorm(config.hidden_size, hf.norm_eps, build, bias=hf.norm_bias)
        self.mlp = GatedUnit(config, build, bias=hf.mlp_bias, down_bias=hf.mlp_bias)

    def forward(
        self,
        hidden: torch.Tensor,
        rows: RaggedRows,
        cos_sin: torch.Tensor,
        window: torch.Tensor | None,
    ) -> torch.Tensor:
        hidden = hidden + self.attn(self.attn_norm(hidden), rows, cos_sin, window)
        out: torch.Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return out


class ModernBertModel(nn.Module):
    causal: ClassVar[bool] = False
    pooling_type: ClassVar[Literal["CLS", "LAST", "MEAN"]] = "CLS"
    weight_map: ClassVar[WeightMap] = WholeProjections(
        stacked=PROJECTIONS,
        prefixes={"model.": ""},
        parts={"Wo": "o_proj", "mlp.o_proj": "mlp.down_proj"},
        wholes={"Wqkv": ("q_proj", "k_proj", "v_proj"), "Wi": ("gate_proj", "up_proj")},
        ignored=("head.", "decoder."),
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        if FEATURE not in build.operations.features:
            raise ConfigError(
                f"operations: {build.operations.name!r} do not support {FEATURE}",
                param="operations",
            )
        self.kinds = tuple(hf.layer_types)
        self.rotaries: Any = nn.ModuleDict(
            {kind: Rotary(config, build, rope_of_type(hf, kind)) for kind in set(self.kinds)}
        )
        self.embeddings = ModernEmbeddings(config, build)
        self.layers = nn.ModuleList(
            ModernLayer(config, layer, build) for layer in range(config.num_layers)
        )
        self.final_norm = LayerNorm(config.hidden_size, hf.norm_eps, build, bias=hf.norm_bias)
        reach = hf.local_attention // 2
        window = torch.zeros(1, 2 * reach + 3, device=build.device)
        window[0, [0, -1]] = float("-inf")  # All distances beyond the reach.
        self.register_buffer("window", window, persistent=False)

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        rows = RaggedRows.of(context.layout.query_start_cpu, input_ids.device)
        cos_sin = {
            kind: rotary.cos_sin[context.positions][:, None]
            for kind, rotary in self.rotaries.items()
        }
        hidden: torch.Tensor = self.embeddings(input_ids)
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            window = self.window if kind == "sliding_attention" else None
            hidden = layer(hidden, rows, cos_sin[kind], window)
        return hidden

    def pooling_states(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.final_norm(hidden)
        return out


class PredictionHead(nn.Module):
    """norm(activation(dense(state)))"""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        self.dense = Linear(config.hidden_size, config.hidden_size, build, bias=hf.classifier_bias)
        self.activation = activation_named(hf.classifier_activation, field="classifier_activation")
        self.norm = LayerNorm(config.hidden_size, hf.norm_eps, build, bias=hf.norm_bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.activation(self.dense(states)))
        return out


class ModernBertForSequenceClassification(ModernBertModel):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.head = PredictionHead(config, build)
        self.classifier = Linear(config.hidden_size, config.hf_config.num_labels, build, bias=True)

    @classmethod
    def pooling_type_of(cls, hf_config: Any) -> str:
        """Return by what its classifier was trained."""
        return {"cls": "CLS", "mean": "MEAN"}[hf_config.classifier_pooling]

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.head(pooled))
        return logits


class ModernBertForTokenClassification(ModernBertForSequenceClassification):
    classifies_tokens: ClassVar[bool] = True
