"""StarCoder2: layer norms and biases, an MLP without a gate, a sliding window."""

from __future__ import annotations

from typing import Any

from ...core.loading.weight_map import WeightMap
from .decoder import QKV_SHARDS, CausalLM, HeadlessLM
from .mistral import MistralAttention
from .parts import LayerNormDecoder, plain_mlp


class Starcoder2Attention(MistralAttention):
    @staticmethod
    def qkv_bias(hf: Any) -> bool:
        return bool(hf.use_bias)

    output_bias = qkv_bias


class Starcoder2ForCausalLM(CausalLM):
    attention = Starcoder2Attention
    decoder = LayerNormDecoder
    weight_map = WeightMap(
        stacked=QKV_SHARDS,
        tied=HeadlessLM.weight_map.tied,
        names={"up_proj": "c_fc", "down_proj": "c_proj"},
    )

    mlp = staticmethod(plain_mlp)
