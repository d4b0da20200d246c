"""Qwen2-MoE: a mixture in most layers, with one expert that all tokens share, times a gate."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.mlp import GatedMLP
from ...core.nn.routing import RoutingRule
from ...core.protocols.field_kinds import SIZE
from .decoder import CausalLM
from .expert_fields import EXPERTS, SPARSE_LAYERS
from .qwen2 import Qwen2Attention
from .qwen3_moe import is_sparse
from .windows import QWEN_WINDOWS


class Qwen2MoeAttention(Qwen2Attention):
    @staticmethod
    def qkv_bias(hf: Any) -> bool:
        return bool(hf.qkv_bias)


class Qwen2MoeForCausalLM(CausalLM):
    config_fields = {
        **EXPERTS,
        **SPARSE_LAYERS,
        **QWEN_WINDOWS,
        "shared_expert_intermediate_size": SIZE,
    }
    attention = Qwen2MoeAttention
    weight_map = dataclasses.replace(CausalLM.weight_map, names={"shared_experts": "shared_expert"})

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        if not is_sparse(hf, layer):
            return CausalLM.mlp(config, layer, build)
        return shared_mixture(hf, build, renormalize=hf.norm_topk_prob)


def shared_mixture(hf: Any, build: BuildContext, *, renormalize: bool) -> SparseMLP:
    """Create a mixture with a gated expert for all tokens. renormalize: the weights of a token's
    other experts sum to 1.
    """
    return SparseMLP(
        hf.num_experts,
        RoutingRule(hf.num_experts_per_tok, renormalize=renormalize),
        hf.hidden_size,
        hf.moe_intermediate_size,
        hf.hidden_act,
        build,
        shared=GatedMLP(hf.hidden_size, hf.shared_expert_intermediate_size, hf.hidden_act, build),
        shared_gate=True,
    )
