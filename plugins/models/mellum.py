"""Mellum: Qwen3 with experts, windows in some layers, and rotations by layer type."""

from __future__ import annotations

from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.routing import RoutingRule
from .decoder import CausalLM, Decoder, rotaries_by_type
from .deepseek_moe import is_dense
from .expert_fields import DEEPSEEK_EXPERTS
from .qwen3 import Qwen3Attention


class MellumDecoder(Decoder):
    rotaries_of = staticmethod(rotaries_by_type)


class MellumForCausalLM(CausalLM):
    config_fields = DEEPSEEK_EXPERTS
    attention = Qwen3Attention
    decoder = MellumDecoder

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        if is_dense(hf, layer):
            return CausalLM.mlp(config, layer, build)
        return SparseMLP(
            hf.num_experts,
            RoutingRule(hf.num_experts_per_tok, renormalize=hf.norm_topk_prob),
            hf.hidden_size,
            hf.moe_intermediate_size,
            hf.hidden_act,
            build,
        )
