"""DeepSeek's mixture of experts in models with ordinary attention: DeepSeek-MoE, GLM-4.5, dots.llm1
and Solar Open.

The first layers have an MLP; in the others, experts are chosen by the sigmoid of their logits plus
a bias (`RoutingRule`), beside shared experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.mlp import GatedMLP
from ...core.nn.norm import RMSNorm
from ...core.nn.routing import RoutingRule
from .blocks import SelfAttention
from .decoder import CausalLM
from .expert_fields import DEEPSEEK_EXPERTS
from .qwen3 import Qwen3Attention
from .windows import QWEN_WINDOWS


def further_layers(config: ModelConfig) -> tuple[str, ...]:
    """Return what names of tensors of layers that predict further tokens begin with."""
    more: int = getattr(config.hf_config, "num_nextn_predict_layers", None) or 0
    first = config.num_layers
    return tuple(f"model.layers.{layer}." for layer in range(first, first + more))


class DeepseekMoeForCausalLM(CausalLM):
    """Decoder with such mixtures, without the layers that predict further tokens."""

    config_fields = DEEPSEEK_EXPERTS

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.weight_map = dataclasses.replace(type(self).weight_map, ignored=further_layers(config))

    @staticmethod
    def score_bias(hf: Any) -> bool:
        """Return whether the choice of experts has a learned bias."""
        return True

    @staticmethod
    def rule(hf: Any) -> RoutingRule:
        """Raises ConfigError."""
        return RoutingRule(
            hf.num_experts_per_tok,
            scoring="sigmoid",
            renormalize=bool(hf.norm_topk_prob),
            groups=hf.n_group or 1,
            top_groups=hf.topk_group or 1,
            factor=hf.routed_scaling_factor,
        )

    @classmethod
    def mlp(cls, config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        if is_dense(hf, layer):
            return CausalLM.mlp(config, layer, build)
        inner, shared = hf.moe_intermediate_size, getattr(hf, "n_shared_experts", None) or 0
        return SparseMLP(
            hf.n_routed_experts,
            cls.rule(hf),
            hf.hidden_size,
            inner,
            hf.hidden_act,
            build,
            score_bias=cls.score_bias(hf),
            wide_router=True,
            shared=GatedMLP(hf.hidden_size, shared * inner, hf.hidden_act, build)
            if shared
            else None,
        )


def is_dense(hf: Any, layer: int) -> bool:
    """Whether a layer has an MLP instead of a mixture."""
    if kinds := getattr(hf, "mlp_layer_types", None):
        return bool(kinds[layer] == "dense")
    every = getattr(hf, "moe_layer_freq", None) or 1
    return layer < (getattr(hf, "first_k_dense_replace", None) or 0) or layer % every > 0


class DeepseekForCausalLM(DeepseekMoeForCausalLM):
    """DeepSeek-MoE: Llama's attention; experts are chosen by softmax."""

    @staticmethod
    def score_bias(hf: Any) -> bool:
        return False

    @staticmethod
    def rule(hf: Any) -> RoutingRule:
        return RoutingRule(hf.num_experts_per_tok, renormalize=bool(hf.norm_topk_prob))


class DeepseekOcr2TextForCausalLM(DeepseekForCausalLM):
    """The text part of DeepSeek-OCR 2."""

    @staticmethod
    def rule(hf: Any) -> RoutingRule:
        grouped = hf.topk_method == "group_limited_greedy"
        return RoutingRule(
            hf.num_experts_per_tok,
            groups=hf.n_group if grouped else 1,
            top_groups=hf.topk_group if grouped else 1,
            factor=hf.routed_scaling_factor,
        )


class Glm4MoeAttention(SelfAttention):
    """Attention with optional norms on each head's queries and keys."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        if config.hf_config.use_qk_norm:
            eps = config.hf_config.rms_norm_eps
            self.q_norm = RMSNorm(self.head_dim, eps, build)
            self.k_norm = RMSNorm(self.head_dim, eps, build)

    @staticmethod
    def output_bias(hf: object) -> bool:
        return False


class Glm4MoeForCausalLM(DeepseekMoeForCausalLM):
    attention = Glm4MoeAttention


class Dots1ForCausalLM(DeepseekMoeForCausalLM):
    config_fields = QWEN_WINDOWS
    attention = Qwen3Attention


class SolarOpenForCausalLM(DeepseekMoeForCausalLM):
    """Llama's attention; a part of each head may be rotated."""
