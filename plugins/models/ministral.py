"""Ministral (windows in some layers), Ministral 3 (queries grow with their position), Seed-OSS
(output biases), CWM (Llama with windows).
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.rotary import Rotary
from .blocks import SelfAttention
from .decoder import CausalLM
from .mistral import MistralAttention
from .windows import WindowedAttention


class MinistralAttention(WindowedAttention, MistralAttention):
    """As Mistral's, with windows in some layers."""


class MinistralForCausalLM(CausalLM):
    attention = MinistralAttention


class Growth:
    """Multiplies queries by 1 + beta * ln(1 + floor(position / original length))."""

    def __init__(self, config: ModelConfig) -> None:
        own = getattr(config.hf_config, "llama_4_scaling", None) or {}
        rope = config.rope_parameters
        length = own.get("original_max_position_embeddings")
        length = length or rope.get("original_max_position_embeddings") or config.max_model_len
        self.original = int(length)
        self.beta = 0.0
        if config.max_model_len > self.original:
            self.beta = float(own.get("beta") or rope.get("llama_4_scaling_beta") or 0.0)

    def apply(self, queries: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens, any], overwritten → the same"""
        if self.beta:
            times = torch.log1p((context.positions // self.original).float())
            queries.mul_((1 + self.beta * times).to(queries.dtype)[:, None])
        return queries


class GrowingAttention(MistralAttention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        self.growth = Growth(config)

    def heads(
        self, qkv: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        self.growth.apply(qkv[:, : self.num_heads * self.head_dim], context)
        return super().heads(qkv, rotary, context)


class Ministral3ForCausalLM(CausalLM):
    attention = GrowingAttention


class SeedOssAttention(SelfAttention):
    @staticmethod
    def output_bias(hf: Any) -> bool:
        return bool(hf.attention_out_bias)


class SeedOssForCausalLM(CausalLM):
    attention = SeedOssAttention


class CwmForCausalLM(CausalLM):
    attention = MinistralAttention
