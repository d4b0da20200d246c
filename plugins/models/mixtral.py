"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

import dataclasses

from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard
from ...core.nn.context import BuildContext
from .decoder import CausalLM
from .expert_fields import EXPERTS
from .mistral import MistralAttention
from .parts import renormalized_mixture


class MixtralForCausalLM(CausalLM):
    config_fields = EXPERTS
    attention = MistralAttention
    weight_map = dataclasses.replace(
        CausalLM.weight_map,
        stacked={
            **{part: CausalLM.weight_map.stacked[part] for part in ("q_proj", "k_proj", "v_proj")},
            "w1": Shard("gate_up_proj", "gate"),
            "w2": Shard("down_proj", ""),
            "w3": Shard("gate_up_proj", "up"),
        },
        names={"mlp": "block_sparse_moe"},
    )

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        return renormalized_mixture(config.hf_config, build)
