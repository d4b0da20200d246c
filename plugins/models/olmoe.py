"""OLMoE and FlexOlmo: mixtures in every layer, and norms over all queries and all keys."""

from __future__ import annotations

from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.routing import RoutingRule
from .decoder import CausalLM
from .expert_fields import EXPERTS
from .olmo2 import Olmo2Attention, Olmo2Decoder


class OlmoeForCausalLM(CausalLM):
    config_fields = EXPERTS
    attention = Olmo2Attention

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        if getattr(config.hf_config, "clip_qkv", None) is not None:
            raise ConfigError("clip_qkv: is not supported for this model", param="clip_qkv")
        super().__init__(config, build)

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        return SparseMLP(
            hf.num_experts,
            RoutingRule(hf.num_experts_per_tok, renormalize=hf.norm_topk_prob),
            hf.hidden_size,
            hf.intermediate_size,
            hf.hidden_act,
            build,
        )


class FlexOlmoForCausalLM(OlmoeForCausalLM):
    decoder = Olmo2Decoder
