"""MiniMax-M2: norms over all queries and all keys, a part of each head rotated, and experts chosen
by sigmoids with a bias."""

from __future__ import annotations

import dataclasses

from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.routing import RoutingRule
from .decoder import CausalLM
from .expert_fields import EXPERTS
from .mixtral import MixtralForCausalLM
from .olmo2 import Olmo2Attention


class MiniMaxM2ForCausalLM(CausalLM):
    config_fields = EXPERTS
    attention = Olmo2Attention
    weight_map = dataclasses.replace(
        MixtralForCausalLM.weight_map,
        names={
            "gate.e_score_correction_bias": "e_score_correction_bias",
            "mlp": "block_sparse_moe",
        },
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        more = int(getattr(config.hf_config, "num_mtp_modules", None) or 0)
        first = config.num_layers
        ignored = tuple(f"model.layers.{layer}." for layer in range(first, first + more))
        self.weight_map = dataclasses.replace(type(self).weight_map, ignored=ignored)

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        return SparseMLP(
            hf.num_local_experts,
            RoutingRule(hf.num_experts_per_tok, scoring="sigmoid", renormalize=True),
            hf.hidden_size,
            hf.intermediate_size,
            hf.hidden_act,
            build,
            score_bias=True,
        )
