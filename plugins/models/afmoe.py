"""Trinity (AFMoE): four norms in a layer, gates of what attention returns, rotations in windows
alone, and DeepSeek's mixtures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.experts import SparseMLP
from ...core.nn.linear import MergedLinear
from ...core.nn.mlp import GatedMLP
from ...core.nn.norm import RMSNorm
from ...core.nn.rotary import Rotary
from ...core.nn.routing import RoutingRule
from ...core.protocols.field_kinds import SIZE_OR_ZERO
from .decoder import CausalLM, Decoder
from .expert_fields import EXPERTS
from .pangu import PanguBlock
from .windows import WindowedAttention, window_of_layer


class AfmoeAttention(WindowedAttention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        hf, own = config.hf_config, self.own.rows(self.head_dim)
        width, keys = self.all_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.operations = build.operations
        self.qkv_proj = MergedLinear(
            hf.hidden_size, {"q": width, "k": keys, "v": keys, "g": width}, build, shard="out",
            shares={**own, "g": own["q"]},
        )  # fmt: skip
        eps = float(hf.rms_norm_eps)
        self.q_norm = RMSNorm(self.head_dim, eps, build)
        self.k_norm = RMSNorm(self.head_dim, eps, build)

    def heads(
        self, qkv: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        qkv, gate = qkv.tensor_split((-self.num_heads * self.head_dim,), dim=-1)
        heads = super().heads(qkv.contiguous(), rotary, context)
        return self.operations.sigmoid_gate(heads, gate)


class AfmoeDecoder(Decoder):
    block = PanguBlock

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        rotary, hf = Rotary(config, build), config.hf_config
        windows = (window_of_layer(hf, layer) for layer in range(config.num_layers))
        return [None if window is None else rotary for window in windows]

    @staticmethod
    def embedding_scale(config: ModelConfig, build: BuildContext) -> float | None:
        return float(config.hidden_size**0.5) if config.hf_config.mup_enabled else None


class AfmoeForCausalLM(CausalLM):
    config_fields = EXPERTS | {"num_shared_experts": SIZE_OR_ZERO}
    attention = AfmoeAttention
    decoder = AfmoeDecoder
    weight_map = dataclasses.replace(
        CausalLM.weight_map,
        stacked={**CausalLM.weight_map.stacked, "out_gate_proj": Shard("qkv_proj", "g")},
        names={
            "self_attn.out_gate_proj": "self_attn.gate_proj",
            "gate.e_score_correction_bias": "expert_bias",
            "gate": "router.gate",
        },
    )

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        if layer < (hf.num_dense_layers or 0):
            return CausalLM.mlp(config, layer, build)
        size, inner, shared = hf.hidden_size, hf.moe_intermediate_size, hf.num_shared_experts or 0
        rule = RoutingRule(
            hf.num_experts_per_tok, scoring="sigmoid", renormalize=True,
            factor=float(hf.route_scale),
        )  # fmt: skip
        return SparseMLP(
            hf.num_experts, rule, size, inner, hf.hidden_act, build, score_bias=True,
            shared=GatedMLP(size, shared * inner, hf.hidden_act, build) if shared else None,
        )  # fmt: skip
