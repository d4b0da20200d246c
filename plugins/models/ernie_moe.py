"""ERNIE 4.5 with experts: chosen with a bias, beside shared ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder, WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.mlp import GatedMLP
from ...core.nn.routing import RoutingRule
from .expert_fields import EXPERTS
from .helium import Ernie4_5ForCausalLM

BIAS = "moe_statics.e_score_correction_bias"


class ErnieMoeWeightMap(WeightMap):
    def pieces(
        self, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, str | None, torch.Tensor]]:
        yield from super().pieces(name, tensor.flatten() if name.endswith(BIAS) else tensor)


class Ernie4_5_MoeForCausalLM(Ernie4_5ForCausalLM):
    config_fields = EXPERTS
    weight_map = ErnieMoeWeightMap(
        **{
            **vars(Ernie4_5ForCausalLM.weight_map),
            "names": {"gate.e_score_correction_bias": BIAS},
            "ignored": ("model.mtp_",),
        }
    )

    @staticmethod
    def head_bias(hf: Any) -> bool:
        return bool(hf.use_bias)

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        return Ernie4_5ForCausalLM.row_orders(config)

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        sparse = hf.moe_layer_start_index <= layer <= hf.moe_layer_end_index
        if not sparse or (layer + 1) % hf.moe_layer_interval:
            return Ernie4_5ForCausalLM.mlp(config, layer, build)
        size, inner, shared = hf.hidden_size, hf.moe_intermediate_size, hf.moe_num_shared_experts
        return SparseMLP(
            hf.moe_num_experts,
            RoutingRule(hf.moe_k, renormalize=True),
            size,
            inner,
            hf.hidden_act,
            build,
            score_bias=True,
            wide_router=True,
            shared=GatedMLP(size, shared * inner, hf.hidden_act, build, bias=hf.use_bias)
            if shared
            else None,
        )
