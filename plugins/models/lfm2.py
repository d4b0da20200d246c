"""LFM2: short convolutions in most layers, attention in some; its mixtures of experts."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.mlp import GatedMLP
from ...core.nn.norm import RMSNorm
from ...core.nn.routing import RoutingRule
from ...core.nn.state.short_conv import ShortConv
from ...core.protocols.field_kinds import NUMBER
from .blocks import BlockParts, SelfAttention
from .decoder import QKV_SHARDS, CausalLM, Decoder
from .expert_fields import EXPERTS
from .mixer import HybridBlock


class Lfm2Attention(SelfAttention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        eps = float(config.hf_config.norm_eps)
        self.q_norm = RMSNorm(self.head_dim, eps, build)
        self.k_norm = RMSNorm(self.head_dim, eps, build)


class Lfm2Block(HybridBlock):
    norms: ClassVar[tuple[str, ...]] = ("operator_norm", "ffn_norm")
    state_name = "conv"

    def make_mixer(self, parts: BlockParts, layer: int) -> nn.Module:
        hf = parts.config.hf_config
        return ShortConv(hf.hidden_size, hf.conv_L_cache, parts.build, bias=hf.conv_bias)


class Lfm2Decoder(Decoder):
    block = Lfm2Block


class Lfm2ForCausalLM(CausalLM):
    attention = Lfm2Attention
    decoder = Lfm2Decoder
    weight_map = dataclasses.replace(
        CausalLM.weight_map,
        stacked={
            **QKV_SHARDS, "w1": Shard("gate_up_proj", "gate"), "w3": Shard("gate_up_proj", "up"),
        },
        names={
            "mlp": "feed_forward", "down_proj": "w2", "o_proj": "out_proj",
            "q_norm": "q_layernorm", "k_norm": "k_layernorm",
            "model.norm": "model.embedding_norm",
        },
    )  # fmt: skip

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        size = hf.intermediate_size
        if hf.block_auto_adjust_ff_dim:
            size = int(2 * size / 3)
            if hf.block_ffn_dim_multiplier is not None:
                multiple = hf.block_multiple_of
                size = -(-int(hf.block_ffn_dim_multiplier * size) // multiple) * multiple
        return GatedMLP(hf.hidden_size, size, "silu", build)


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """Experts in all but the first layers, chosen by the sigmoid of their logits."""

    config_fields = EXPERTS | {"routed_scaling_factor": NUMBER}
    weight_map = dataclasses.replace(
        Lfm2ForCausalLM.weight_map,
        names={
            **Lfm2ForCausalLM.weight_map.names, "gate.e_score_correction_bias": "expert_bias",
        },
    )  # fmt: skip

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        if layer < hf.num_dense_layers:
            return GatedMLP(hf.hidden_size, hf.intermediate_size, "silu", build)
        rule = RoutingRule(
            hf.num_experts_per_tok,
            scoring="sigmoid",
            renormalize=bool(hf.norm_topk_prob),
            factor=float(hf.routed_scaling_factor),
        )
        return SparseMLP(
            hf.num_experts, rule, hf.hidden_size, hf.moe_intermediate_size, "silu", build,
            score_bias=bool(hf.use_expert_bias),
        )  # fmt: skip
