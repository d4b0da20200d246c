"""GPT-2 and GPT-BigCode (SantaCoder, StarCoder): learned positions, layer norms, an MLP without a
gate. GPT-2 stores matrices transposed; GPT-BigCode may share one key and value head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder
from ...core.protocols.attention import AttentionSpec
from ...core.protocols.field_kinds import INTEGER
from .decoder import CausalLM
from .parts import (
    FusedAttention,
    LayerNormBlock,
    OldWeightMap,
    PositionDecoder,
    grouped_rows,
    plain_mlp,
)


class Gpt2Attention(FusedAttention):
    @staticmethod
    def qkv_bias(hf: object) -> bool:
        return True

    output_bias = qkv_bias

    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        spec = super().spec(hf, layer)
        scale = spec.scale if hf.scale_attn_weights else 1.0
        if getattr(hf, "scale_attn_by_inverse_layer_idx", False):
            scale /= layer + 1
        return msgspec.structs.replace(spec, scale=scale)


class Gpt2Decoder(PositionDecoder):
    block = LayerNormBlock


class GPT2LMHeadModel(CausalLM):
    ignored_fields = frozenset({"head_dim"})
    config_fields = {"n_head": INTEGER, "n_layer": INTEGER}
    attention: ClassVar[type[Gpt2Attention]] = Gpt2Attention
    decoder = Gpt2Decoder
    weight_map = OldWeightMap(
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        prefixes={"transformer.": "model."} | {f"{p}.": f"model.{p}." for p in
                                               ("wte", "wpe", "h", "ln_f")},
        names={
            "embed_tokens": "wte", "embed_positions": "wpe", "layers": "h", "norm": "ln_f",
            "self_attn.o_proj": "attn.c_proj",
            "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn": "attn",
            "qkv_proj": "c_attn", "up_proj": "c_fc", "down_proj": "c_proj",
        },
        masks=(".attn.bias", ".attn.masked_bias"),
        transposed=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
    )  # fmt: skip

    mlp = staticmethod(plain_mlp)


class BigCodeAttention(Gpt2Attention):
    @staticmethod
    def kv_heads(config: ModelConfig) -> int:
        return 1 if config.hf_config.multi_query else config.num_heads


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    attention = BigCodeAttention

    weight_map = replace(GPT2LMHeadModel.weight_map, transposed=())

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        return {"qkv_proj": grouped_rows(config, BigCodeAttention.kv_heads(config))}
