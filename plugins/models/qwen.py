"""The first Qwen: Qwen2 by other names, with queries, keys and values as one tensor.

Longer contexts than `seq_length`, which it stretches on demand, are not served.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard, WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.mlp import GatedMLP
from .decoder import CausalLM
from .parts import FusedAttention


class QwenAttention(FusedAttention):
    @staticmethod
    def qkv_bias(hf: object) -> bool:
        return True

    @staticmethod
    def output_bias(hf: Any) -> bool:
        return not hf.no_bias


class QWenLMHeadModel(CausalLM):
    attention = QwenAttention
    weight_map = WeightMap(
        stacked={"w2": Shard("gate_up_proj", "gate"), "w1": Shard("gate_up_proj", "up")},
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        prefixes={"transformer.": "model."},
        names={
            "embed_tokens": "wte", "layers": "h", "norm": "ln_f", "self_attn.o_proj": "attn.c_proj",
            "self_attn": "attn", "qkv_proj": "c_attn", "down_proj": "c_proj",
            "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
        },
    )  # fmt: skip

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        return GatedMLP(
            hf.hidden_size, hf.intermediate_size // 2, hf.hidden_act, build, bias=not hf.no_bias
        )
