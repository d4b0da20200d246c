"""Mistral Small 4 and Mistral Large 3: DeepSeek V3 whose experts are chosen by softmax, and whose
queries grow with their position."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import StackedExperts, WeightMap
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.rotary import Rotary
from ...core.nn.routing import RoutingRule
from .deepseek import DeepseekV3ForCausalLM
from .latent import LATENT_MAP, LatentDecoder, LatentSelfAttention
from .ministral import Growth


class GrowingLatentAttention(LatentSelfAttention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        self.growth = Growth(config)

    def scaled(self, query: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return self.growth.apply(query, context)


class Mistral4Decoder(LatentDecoder):
    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        """`partial_rotary_factor` refers to whole heads: all of these channels rotate."""
        hf = copy.copy(config.hf_config)
        hf.rope_parameters = {**config.rope_parameters, "partial_rotary_factor": 1.0}
        return LatentDecoder.rotaries_of(dataclasses.replace(config, hf_config=hf), build)


class Mistral4ForCausalLM(DeepseekV3ForCausalLM):
    attention = GrowingLatentAttention
    decoder = Mistral4Decoder
    weight_map: WeightMap = dataclasses.replace(
        LATENT_MAP,
        together={
            "gate_up_proj": StackedExperts("gate_up_proj.weight", ("gate", "up"), joined=True),
            "down_proj": StackedExperts("down_proj.weight"),
        },
    )

    @staticmethod
    def score_bias(hf: Any) -> bool:
        return False

    @staticmethod
    def rule(hf: Any) -> RoutingRule:
        if (hf.n_group or 1) > 1:
            raise ConfigError(f"n_group: {hf.n_group} is not supported here", param="n_group")
        return DeepseekV3ForCausalLM.rule(hf)._replace(scoring="softmax")


class MistralLarge3ForCausalLM(Mistral4ForCausalLM):
    weight_map = LATENT_MAP

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """`apply_yarn_scaling` false: the scale of scores ignores stretched positions."""
        hf = copy.copy(config.hf_config)
        if config.rope_parameters.get("apply_yarn_scaling") is False:
            hf.rope_parameters = {
                **config.rope_parameters, "attention_factor": 1.0, "mscale_all_dim": None
            }  # fmt: skip
        super().__init__(dataclasses.replace(config, hf_config=hf), build)
