"""Mistral Small 4 and Mistral Large 3: DeepSeek V3 whose experts are chosen by softmax, and whose
queries grow with their position."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import torch

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Together, WeightMap
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
        """`partial_rotary_factor` is the part of a head that these channels are: all turn."""
        hf = copy.copy(config.hf_config)
        hf.rope_parameters = {**config.rope_parameters, "partial_rotary_factor": 1.0}
        return LatentDecoder.rotaries_of(dataclasses.replace(config, hf_config=hf), build)


class Mistral4ForCausalLM(DeepseekV3ForCausalLM):
    tensor_parallel = True
    attention = GrowingLatentAttention
    decoder = Mistral4Decoder
    weight_map: WeightMap = dataclasses.replace(
        LATENT_MAP,
        together={
            "gate_up_proj": Together("gate_up_proj.weight", ("gate", "up"), joined=True),
            "down_proj": Together("down_proj.weight"),
        },
    )

    @staticmethod
    def score_bias(hf: Any) -> bool:
        return False

    @staticmethod
    def rule(hf: Any) -> RoutingRule:
        """Raises ConfigError for groups of experts, which no published checkpoint has."""
        if (hf.n_group or 1) > 1:
            raise ConfigError(f"n_group: {hf.n_group} is not supported here", param="n_group")
        return DeepseekV3ForCausalLM.rule(hf)._replace(scoring="softmax")


class MistralWeightMap(WeightMap):
    """Tensors by the usual names, or by those of Mistral's own checkpoints."""

    def renamed(self, name: str) -> str:
        own = re.sub(r"^layers\.(\d+)\.(gate|(?:shared_)?experts)\.", r"layers.\1.mlp.\2.", name)
        return super().renamed(own)


PARTS = {
    "attention": "self_attn", "attention_norm": "input_layernorm", "wq": "q_proj",
    "wq_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "wq_b": "q_b_proj",
    "wkv_a_with_mqa": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj",
    "wo": "o_proj", "ffn_norm": "post_attention_layernorm", "feed_forward": "mlp",
    "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "qscale_act": "input_scale",
    "qscale_weight": "weight_scale",
}  # fmt: skip
PREFIXES = {"tok_embeddings.": "model.embed_tokens.", "output.": "lm_head."}
IMAGES = ("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.")
"""Starts of names of what reads images, which is not loaded."""


class MistralLarge3ForCausalLM(Mistral4ForCausalLM):
    tensor_parallel = True
    weight_map = MistralWeightMap(
        stacked=LATENT_MAP.stacked,
        tied=LATENT_MAP.tied,
        prefixes={**LATENT_MAP.prefixes, **PREFIXES},
        parts=PARTS,
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """`apply_yarn_scaling` false: stretched positions do not change the scale of scores."""
        hf = copy.copy(config.hf_config)
        if config.rope_parameters.get("apply_yarn_scaling") is False:
            hf.rope_parameters = {
                **config.rope_parameters, "attention_factor": 1.0, "mscale_all_dim": None
            }  # fmt: skip
        super().__init__(dataclasses.replace(config, hf_config=hf), build)
        ignored = (*self.weight_map.ignored, *IMAGES)
        self.weight_map = dataclasses.replace(self.weight_map, ignored=ignored)
