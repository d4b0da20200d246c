"""Bailing (Ling, Ring), Sarvam and Param 2: DeepSeek's mixtures, chosen by sigmoids or a softmax,
in Llama's blocks."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard, WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.mlp import GatedMLP
from .blocks import SelfAttention
from .decoder import CausalLM
from .deepseek_moe import DeepseekMoeForCausalLM, Glm4MoeAttention, is_dense
from .parts import FusedAttention


class BailingAttention(FusedAttention, Glm4MoeAttention):
    @staticmethod
    def qkv_bias(hf: Any) -> bool:
        return bool(getattr(hf, "use_qkv_bias", False))

    @staticmethod
    def output_bias(hf: Any) -> bool:
        return bool(getattr(hf, "use_bias", False))


class BailingMoeForCausalLM(DeepseekMoeForCausalLM):
    attention: ClassVar[type[SelfAttention]] = BailingAttention
    weight_map = WeightMap(
        stacked={
            "gate_proj": Shard("gate_up_proj", "gate"), "up_proj": Shard("gate_up_proj", "up"),
        },
        tied=CausalLM.weight_map.tied,
        names={
            "model.embed_tokens": "model.word_embeddings", "self_attn": "attention",
            "qkv_proj": "query_key_value", "o_proj": "dense", "q_norm": "query_layernorm",
            "k_norm": "key_layernorm", "gate.e_score_correction_bias": "gate.expert_bias",
        },
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        if getattr(config.hf_config, "norm_head", False):
            raise ConfigError("norm_head: true is not supported", param="norm_head")
        super().__init__(config, build)

    @classmethod
    def mlp(cls, config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        if is_dense(hf, layer):
            return CausalLM.mlp(config, layer, build)
        scoring: Any = getattr(hf, "score_function", None) or "softmax"
        if scoring not in ("softmax", "sigmoid"):
            raise ConfigError(
                f"score_function: {scoring!r} is not supported", param="score_function"
            )
        size, inner = hf.hidden_size, hf.moe_intermediate_size
        each = getattr(hf, "moe_shared_expert_intermediate_size", None) or inner
        shared = each * (hf.num_shared_experts or 0)
        return SparseMLP(
            hf.num_experts,
            cls.rule(hf)._replace(scoring=scoring),
            size,
            inner,
            hf.hidden_act,
            build,
            score_bias=bool(getattr(hf, "moe_router_enable_expert_bias", False)),
            wide_router=True,
            shared=GatedMLP(size, shared, hf.hidden_act, build) if shared else None,
        )


class BailingMoeV2ForCausalLM(BailingMoeForCausalLM):
    pass
