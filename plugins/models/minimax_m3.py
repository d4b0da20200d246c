"""MiniMax-M3 (text), up to its indexers' limit: norms of each head, clamped gates, and experts
chosen by sigmoids with a bias, beside a shared one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.activations import ClampedSwiGLU
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.mlp import GatedMLP
from ...core.nn.norm import OffsetRMSNorm
from ...core.nn.rotary import Rotary
from ...core.nn.routing import RoutingRule
from ...core.protocols.field_kinds import NUMBER
from .blocks import SelfAttention
from .decoder import CausalLM, Decoder
from .expert_fields import DEEPSEEK_EXPERTS
from .gemma import GemmaBlock
from .mixtral import MixtralForCausalLM


class MiniMaxM3Attention(SelfAttention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        eps = float(config.hf_config.rms_norm_eps)
        self.q_norm = OffsetRMSNorm(self.head_dim, eps, build)
        self.k_norm = OffsetRMSNorm(self.head_dim, eps, build)


class MiniMaxM3Decoder(Decoder):
    block = GemmaBlock

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        """`rotary_dim` is the default number of rotated channels."""
        rope = config.rope_parameters
        rope.setdefault("partial_rotary_factor", config.hf_config.rotary_dim / config.head_dim)
        return [Rotary(config, build, rope)] * config.num_layers


class MiniMaxM3WeightMap(WeightMap):
    """Mixtures are named differently, with Mixtral's names of experts."""

    def renamed(self, name: str) -> str:
        return super().renamed(name.replace(".block_sparse_moe.", ".mlp."))

    def source(self, parameter: str, shard: str | None = None) -> str:
        name = super().source(parameter, shard)
        if ".experts." in name:
            name = name.replace(".gate_proj", ".w1").replace(".up_proj", ".w3")
        mixture = r"\.mlp\.(experts|gate|shared_experts|e_score_correction_bias)\b"
        return re.sub(mixture, r".block_sparse_moe.\1", name)


class MiniMaxM3SparseForCausalLM(CausalLM):
    """Supports texts of up to `index_topk_blocks` blocks, for which indexers choose every key:
    indexers are not loaded. Layers that predict further tokens are not loaded either.
    """

    config_fields = DEEPSEEK_EXPERTS | {"swiglu_limit": NUMBER}
    attention = MiniMaxM3Attention
    decoder = MiniMaxM3Decoder
    weight_map: WeightMap = MiniMaxM3WeightMap(
        stacked={**CausalLM.weight_map.stacked, **MixtralForCausalLM.weight_map.stacked},
        tied=CausalLM.weight_map.tied,
        names={"gate.e_score_correction_bias": "e_score_correction_bias"},
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf = config.hf_config
        most = hf.index_topk_blocks * hf.index_block_size
        if config.max_model_len > most and "minimax_m3_sparse" in hf.layer_types:
            raise ConfigError(
                f"max_model_len: {config.max_model_len} is more than {most} (index_topk_blocks * "
                "index_block_size), beyond which indexers choose what this model reads, which is "
                f"not there; set it to {most}",
                param="max_model_len",
            )
        super().__init__(config, build)
        layers, more = config.num_layers, int(getattr(hf, "num_mtp_modules", None) or 0)
        ignored = [f"model.layers.{layer}.self_attn.index" for layer in range(layers)]
        ignored += [f"model.layers.{layer}." for layer in range(layers, layers + more)]
        self.weight_map = dataclasses.replace(self.weight_map, ignored=(*ignored, "model.mtp."))

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        size = hf.hidden_size
        clamped = ClampedSwiGLU(float(hf.swiglu_alpha), float(hf.swiglu_limit))
        if hf.mlp_layer_types[layer] == "dense":
            return GatedMLP(size, hf.dense_intermediate_size, "silu", build, clamped=clamped)
        rule = RoutingRule(
            hf.num_experts_per_tok, scoring="sigmoid", renormalize=True,
            factor=float(hf.routed_scaling_factor),
        )  # fmt: skip
        return SparseMLP(
            hf.num_local_experts, rule, size, hf.intermediate_size, "silu", build,
            score_bias=True, clamped=clamped,
            shared=GatedMLP(size, hf.shared_intermediate_size, "silu", build, clamped=clamped),
        )  # fmt: skip
