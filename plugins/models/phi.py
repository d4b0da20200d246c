"""Phi 1, 1.5 and 2, and Persimmon: layer norms, an MLP without a gate, biases, a part of each head
rotated, norms of heads. Phi computes attention and MLP side by side, and its head has a bias."""

from __future__ import annotations

from typing import Any, ClassVar

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder, WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.norm import LayerNorm
from .decoder import QKV_SHARDS, CausalLM, Decoder
from .parts import (
    FusedAttention,
    HeadNormAttention,
    LayerNormDecoder,
    ParallelLayerNormDecoder,
    grouped_rows,
    plain_mlp,
)


class PhiAttention(HeadNormAttention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        hf = config.hf_config
        if hf.qk_layernorm:
            self.q_layernorm = LayerNorm(self.head_dim, hf.layer_norm_eps, build)
            self.k_layernorm = LayerNorm(self.head_dim, hf.layer_norm_eps, build)

    @staticmethod
    def qkv_bias(hf: object) -> bool:
        return True

    output_bias = qkv_bias


class PhiForCausalLM(CausalLM):
    attention: ClassVar[type[PhiAttention]] = PhiAttention
    decoder: ClassVar[type[Decoder]] = ParallelLayerNormDecoder
    weight_map = WeightMap(
        stacked=QKV_SHARDS,
        tied=CausalLM.weight_map.tied,
        names={"norm": "final_layernorm", "o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2"},
    )

    mlp = staticmethod(plain_mlp)

    @staticmethod
    def head_bias(hf: Any) -> bool:
        return True


class PersimmonAttention(FusedAttention, PhiAttention):
    """The checkpoint stores queries, keys and values by head."""


class PersimmonForCausalLM(PhiForCausalLM):
    attention = PersimmonAttention
    decoder = LayerNormDecoder
    weight_map = WeightMap(
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        names={
            "norm": "final_layernorm", "qkv_proj": "query_key_value", "o_proj": "dense",
            "up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h",
        },
    )  # fmt: skip

    @staticmethod
    def head_bias(hf: Any) -> bool:
        return False

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        return {"qkv_proj": grouped_rows(config, config.num_heads)}
