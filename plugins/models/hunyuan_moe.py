"""Hunyuan with experts, and Hunyuan 3: mixtures beside an MLP for all tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.mlp import GatedMLP
from ...core.nn.routing import RoutingRule
from ...core.protocols.field_kinds import INTEGER_OR_INTEGERS, SIZE, SIZE_OR_ZERO
from .decoder import CausalLM
from .deepseek_moe import further_layers, is_dense
from .expert_fields import EXPERTS
from .hunyuan import HunYuanDenseV1ForCausalLM
from .qwen3 import Qwen3Attention


class HunYuanMoEV1ForCausalLM(HunYuanDenseV1ForCausalLM):
    config_fields = {"moe_topk": INTEGER_OR_INTEGERS, "num_experts": SIZE}
    weight_map = dataclasses.replace(
        HunYuanDenseV1ForCausalLM.weight_map,
        names={
            **HunYuanDenseV1ForCausalLM.weight_map.names,
            "shared_experts": "shared_mlp", "gate": "gate.wg",
        },
    )  # fmt: skip

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        return SparseMLP(
            _of_layer(hf, "num_experts", layer),
            RoutingRule(_of_layer(hf, "moe_topk", layer), renormalize=True),
            hf.hidden_size,
            hf.intermediate_size,
            hf.hidden_act,
            build,
            wide_router=True,
            shared=GatedMLP(hf.hidden_size, hf.intermediate_size, hf.hidden_act, build),
        )


def _of_layer(hf: Any, field: str, layer: int) -> int:
    value = getattr(hf, field)
    value = value[layer] if isinstance(value, list) else value
    if not isinstance(value, int):
        raise ConfigError(f"{field}: {value!r} is no number", param=field)
    return value


class HYV3ForCausalLM(CausalLM):
    config_fields = EXPERTS | {"num_shared_experts": SIZE_OR_ZERO}
    attention = Qwen3Attention
    weight_map = dataclasses.replace(
        CausalLM.weight_map,
        names={
            "gate.e_score_correction_bias": "expert_bias", "gate": "router.gate",
            "shared_experts": "shared_mlp",
        },
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.weight_map = dataclasses.replace(type(self).weight_map, ignored=further_layers(config))

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        if is_dense(hf, layer):
            return CausalLM.mlp(config, layer, build)
        inner = hf.moe_intermediate_size
        rule = RoutingRule(
            hf.num_experts_per_tok,
            scoring="sigmoid",
            renormalize=True,
            factor=float(hf.router_scaling_factor),
        )
        return SparseMLP(
            hf.num_experts,
            rule,
            hf.hidden_size,
            inner,
            hf.hidden_act,
            build,
            score_bias=True,
            wide_router=True,
            shared=GatedMLP(hf.hidden_size, hf.num_shared_experts * inner, hf.hidden_act, build),
        )
