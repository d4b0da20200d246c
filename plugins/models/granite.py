"""Granite: Llama with a multiplier on embeddings, scores, block outputs and logits."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.linear import Linear
from ...core.nn.mlp import GatedMLP
from ...core.nn.rotary import Rotary
from ...core.protocols.attention import AttentionSpec
from ...core.protocols.field_kinds import NUMBER, FieldKind
from .blocks import Block, BlockParts, SelfAttention
from .decoder import CausalLM, Decoder, HeadlessLM

MULTIPLIERS: dict[str, FieldKind] = dict.fromkeys(
    ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"),
    NUMBER,
)


class GraniteAttention(SelfAttention):
    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        return msgspec.structs.replace(
            super().spec(hf, layer), scale=float(hf.attention_multiplier)
        )


class GraniteBlock(Block):
    """hidden + multiplier * f(hidden), for attention and then for the MLP."""

    mlp: nn.Module

    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__(parts, layer)
        self.multiplier = self.multiplier_of(parts.config)

    @staticmethod
    def multiplier_of(config: ModelConfig) -> float:
        return float(config.hf_config.residual_multiplier)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        attention, mlp = self.self_attn, self.mlp
        heads = attention.inner(hidden, self.input_layernorm, rotary, context)
        hidden = self.add_scaled(hidden, attention.o_proj, heads)
        if isinstance(mlp, GatedMLP):
            inner = mlp.inner(hidden, self.post_attention_layernorm)
            return self.add_scaled(hidden, mlp.down_proj, inner)
        answer = mlp(hidden, self.post_attention_layernorm, add=False)
        return torch.add(hidden, answer, alpha=self.multiplier)

    def add_scaled(
        self, hidden: torch.Tensor, layer: nn.Module, inner: torch.Tensor
    ) -> torch.Tensor:
        """hidden + multiplier * layer(inner); `hidden` may be overwritten."""
        ranks = self.self_attn.ranks
        if ranks.tensor.size == 1 and isinstance(layer, Linear):
            return layer.add_scaled(hidden, inner, self.multiplier)
        return torch.add(hidden, ranks.add(None, (layer, inner)), alpha=self.multiplier)


class GraniteDecoder(Decoder):
    block = GraniteBlock

    @staticmethod
    def embedding_scale(config: ModelConfig, build: BuildContext) -> float:
        return float(config.hf_config.embedding_multiplier)


class GraniteForCausalLM(CausalLM):
    config_fields = MULTIPLIERS
    attention = GraniteAttention
    decoder = GraniteDecoder

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.logits_factor = 1 / float(config.hf_config.logits_scaling)


class GraniteModel(HeadlessLM):
    config_fields = MULTIPLIERS
    attention = GraniteAttention
    decoder = GraniteDecoder
