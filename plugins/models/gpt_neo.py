"""GPT-Neo: learned positions, layer norms, unscaled scores, a window in every second layer."""

from __future__ import annotations

from typing import Any

import msgspec

from ...core.protocols.attention import AttentionSpec
from .blocks import SelfAttention
from .decoder import QKV_SHARDS, CausalLM
from .gpt2 import Gpt2Decoder
from .parts import OldWeightMap, plain_mlp


class GptNeoAttention(SelfAttention):
    @staticmethod
    def output_bias(hf: object) -> bool:
        return True

    @staticmethod
    def sliding_window(hf: Any, layer: int) -> int | None:
        return int(hf.window_size) if hf.attention_layers[layer] == "local" else None

    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        return msgspec.structs.replace(super().spec(hf, layer), scale=1.0)


class GPTNeoForCausalLM(CausalLM):
    ignored_fields = frozenset({"head_dim"})
    attention = GptNeoAttention
    decoder = Gpt2Decoder
    weight_map = OldWeightMap(
        stacked=QKV_SHARDS,
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        prefixes={"transformer.": "model."},
        names={
            "embed_tokens": "wte", "embed_positions": "wpe", "layers": "h", "norm": "ln_f",
            "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
            "self_attn": "attn.attention", "o_proj": "out_proj",
            "up_proj": "c_fc", "down_proj": "c_proj",
        },
        masks=(".attn.attention.bias", ".attn.attention.masked_bias"),
    )  # fmt: skip

    mlp = staticmethod(plain_mlp)
