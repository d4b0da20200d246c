"""openPangu Ultra MoE: DeepSeek V3 with norms also after attention and MLP."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...core.loading.model_config import ModelConfig
from .blocks import Block, NormedBlock
from .deepseek import DeepseekV3ForCausalLM
from .latent import LATENT_MAP, LatentDecoder, NormedLatentAttention


class PanguBlock(NormedBlock):
    norms = (
        "input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm",
    )  # fmt: skip


class PanguDecoder(LatentDecoder):
    @classmethod
    def block_of(cls, config: ModelConfig) -> type[Block]:
        return PanguBlock if config.hf_config.sandwich_norm else Block


class PanguUltraMoEForCausalLM(DeepseekV3ForCausalLM):
    attention = NormedLatentAttention
    decoder = PanguDecoder
    weight_map = dataclasses.replace(
        LATENT_MAP, names={"gate.e_score_correction_bias": "e_score_correction_bias"}
    )

    @staticmethod
    def score_bias(hf: Any) -> bool:
        return bool(hf.router_enable_expert_bias)
