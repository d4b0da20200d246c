"""Arctic: an MLP after attention in every layer, and a mixture with the same input as attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.experts import SparseMLP
from ...core.nn.mlp import GatedMLP
from ...core.nn.rotary import Rotary
from ...core.nn.routing import RoutingRule
from .blocks import Block, BlockParts
from .decoder import CausalLM, Decoder
from .expert_fields import EXPERTS
from .mixtral import MixtralForCausalLM


class ArcticBlock(Block):
    norms = (*Block.norms, "residual_layernorm")
    residual_layernorm: nn.Module

    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__(parts, layer)
        hf: Any = parts.config.hf_config
        self.residual_mlp = GatedMLP(hf.hidden_size, hf.hidden_size, hf.hidden_act, parts.build)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        routed: torch.Tensor = self.mlp(hidden, self.post_attention_layernorm, add=False)
        hidden = self.self_attn(hidden, self.input_layernorm, rotary, context)
        out: torch.Tensor = self.residual_mlp(hidden, self.residual_layernorm)
        return out + routed


class ArcticDecoder(Decoder):
    block = ArcticBlock


class ArcticForCausalLM(CausalLM):
    config_fields = EXPERTS
    decoder = ArcticDecoder
    weight_map = dataclasses.replace(
        MixtralForCausalLM.weight_map,
        names={"residual_mlp.down_proj": "residual_mlp.w2", "mlp": "block_sparse_moe"},
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        for field, served in (("moe_layer_frequency", 1), ("use_residual", True)):
            if (value := getattr(config.hf_config, field)) != served:
                raise ConfigError(f"{field}: {value} is not supported, only {served}", param=field)
        super().__init__(config, build)

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        top_k = hf.num_experts_per_tok
        return SparseMLP(
            hf.num_local_experts, RoutingRule(top_k, renormalize=top_k > 1), hf.hidden_size,
            hf.intermediate_size, hf.hidden_act, build,
        )  # fmt: skip
