"""EXAONE with experts: EXAONE 4's attention in Llama's blocks, and DeepSeek's mixtures."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.mlp import GatedMLP
from .decoder import CausalLM, Decoder
from .deepseek_moe import DeepseekMoeForCausalLM, is_dense
from .exaone4 import Exaone4Decoder
from .expert_fields import DEEPSEEK_EXPERTS
from .qwen3 import Qwen3Attention


class ExaoneMoeDecoder(Decoder):
    rotaries_of = staticmethod(Exaone4Decoder.rotaries_of)


class ExaoneMoeForCausalLM(CausalLM):
    config_fields = DEEPSEEK_EXPERTS
    attention = Qwen3Attention
    decoder = ExaoneMoeDecoder
    weight_map = dataclasses.replace(
        CausalLM.weight_map,
        names={"gate.e_score_correction_bias": "e_score_correction_bias"},
        ignored=("mtp.",),
    )

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        if is_dense(hf, layer):
            return CausalLM.mlp(config, layer, build)
        size, inner = hf.hidden_size, hf.moe_intermediate_size
        return SparseMLP(
            hf.num_experts,
            DeepseekMoeForCausalLM.rule(hf),
            size,
            inner,
            hf.hidden_act,
            build,
            score_bias=True,
            wide_router=True,
            shared=GatedMLP(size, hf.num_shared_experts * inner, hf.hidden_act, build),
        )
