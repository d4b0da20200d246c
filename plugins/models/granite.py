"""Granite: Llama with a multiplier on embeddings, scores, block outputs and logits."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.rotary import Rotary
from ...core.protocols.attention import AttentionSpec
from .decoder import Block, CausalLM, Decoder, HeadlessLM, MakeMLP, SelfAttention


class GraniteAttention(SelfAttention):
    """Multiplies scores by a factor of the configuration."""

    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        return msgspec.structs.replace(
            super().spec(hf, layer), scale=float(hf.attention_multiplier)
        )


class GraniteBlock(Block):
    """hidden + multiplier * f(hidden), for attention and then for the MLP."""

    mlp: nn.Module

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        build: BuildContext,
        attention: type[SelfAttention],
        mlp: MakeMLP,
    ) -> None:
        super().__init__(config, layer, build, attention, mlp)
        self.multiplier = self.multiplier_of(config)

    @staticmethod
    def multiplier_of(config: ModelConfig) -> float:
        return float(config.hf_config.residual_multiplier)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        answer = self.self_attn(hidden, self.input_layernorm, rotary, context, add=False)
        hidden = torch.add(hidden, answer, alpha=self.multiplier)
        answer = self.mlp(hidden, self.post_attention_layernorm, add=False)
        return torch.add(hidden, answer, alpha=self.multiplier)


class GraniteDecoder(Decoder):
    block = GraniteBlock

    @staticmethod
    def embedding_scale(config: ModelConfig, build: BuildContext) -> float:
        return float(config.hf_config.embedding_multiplier)


class GraniteForCausalLM(CausalLM):
    tensor_parallel = True
    attention = GraniteAttention
    decoder = GraniteDecoder

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.logits_scaling = float(config.hf_config.logits_scaling)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden).div_(self.logits_scaling)


class GraniteModel(HeadlessLM):
    tensor_parallel = True
    attention = GraniteAttention
    decoder = GraniteDecoder
