"""Lara Mini: gated delta nets, windows (rotated) and full attention alternate; mixtures with one
shared expert.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import StackedExperts
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.mlp import GatedMLP
from ...core.nn.norm import RMSNorm
from ...core.nn.routing import RoutingRule
from ...core.nn.state.sizes import DeltaSizes
from ...core.protocols.field_kinds import SIZE
from .afmoe import AfmoeDecoder
from .decoder import CausalLM, Decoder
from .expert_fields import EXPERTS
from .qwen3 import Qwen3Attention
from .qwen3_next import DELTA_NETS, Qwen3NextBlock


class LaraBlock(Qwen3NextBlock):
    norm = RMSNorm

    @staticmethod
    def attends(hf: Any, layer: int) -> bool:
        return bool(hf.layer_types[layer] != "linear_attention")

    @staticmethod
    def shards(sizes: DeltaSizes) -> Mapping[str, int]:
        return {"in_proj": sum(sizes.projection)}


class LaraDecoder(Decoder):
    block = LaraBlock
    rotaries_of = staticmethod(AfmoeDecoder.rotaries_of)


class LaraMiniForCausalLM(CausalLM):
    config_fields = EXPERTS | DELTA_NETS | {"shared_expert_intermediate_size": SIZE}
    attention = Qwen3Attention
    decoder = LaraDecoder
    weight_map = dataclasses.replace(
        CausalLM.weight_map,
        names={"shared_experts": "shared_expert", "linear_attn.norm": "linear_attn.out_norm"},
        together={
            "gate_up_proj": StackedExperts("gate_up_proj.weight", ("gate", "up"), joined=True),
            "down_proj": StackedExperts("down_proj.weight"),
        },
    )

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        rule = RoutingRule(hf.num_experts_per_tok, renormalize=hf.norm_topk_prob)
        size, shared = hf.hidden_size, hf.shared_expert_intermediate_size
        return SparseMLP(
            hf.num_experts, rule, size, hf.moe_intermediate_size, hf.hidden_act, build,
            wide_router=True, shared=GatedMLP(size, shared, hf.hidden_act, build),
        )  # fmt: skip
