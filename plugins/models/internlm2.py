"""InternLM 2: Llama by other names, queries stored with their key and value."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder, Shard, WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.linear import Linear
from .decoder import CausalLM, TokenHead
from .parts import FusedAttention, grouped_rows


class InternLM2ForCausalLM(CausalLM):
    attention = FusedAttention
    weight_map = WeightMap(
        stacked={"w1": Shard("gate_up_proj", "gate"), "w3": Shard("gate_up_proj", "up")},
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        prefixes={"output.": "lm_head."},
        names={
            "embed_tokens": "tok_embeddings", "self_attn": "attention", "qkv_proj": "wqkv",
            "o_proj": "wo", "mlp": "feed_forward", "down_proj": "w2",
            "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        },
    )  # fmt: skip

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        return {"qkv_proj": grouped_rows(config, config.num_kv_heads)}


class InternLM2ForRewardModel(TokenHead):
    """A reward for each token; the last is that of the text."""

    attention = FusedAttention
    weight_map = replace(
        InternLM2ForCausalLM.weight_map,
        prefixes={"v_head.": "score.", **InternLM2ForCausalLM.weight_map.prefixes},
    )
    row_orders = staticmethod(InternLM2ForCausalLM.row_orders)
    num_labels = 1
    activates: ClassVar[bool] = False

    @staticmethod
    def head(size: int, num_labels: int, build: BuildContext) -> nn.Module:
        return Linear(size, num_labels, build)
