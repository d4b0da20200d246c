"""Falcon, both generations: layer norms, an MLP without a gate, queries stored with their key and
value.

The first has one key for all heads, or as many keys as heads; the second has groups. Positions are
rotated or, in Falcon-RW, slopes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder
from ...core.nn.context import BuildContext
from ...core.nn.rotary import Rotary
from ...core.protocols.attention import AttentionSpec
from ...core.protocols.field_kinds import INTEGER
from .blocks import Block
from .decoder import CausalLM, Decoder
from .parts import (
    FusedAttention,
    LayerNormBlock,
    OldWeightMap,
    ParallelLayerNormBlock,
    alibi_slopes,
    grouped_rows,
    plain_mlp,
)


class FalconAttention(FusedAttention):
    @staticmethod
    def kv_heads(config: ModelConfig) -> int:
        hf: Any = config.hf_config
        if hf.new_decoder_architecture or not hf.multi_query:
            return int(hf.num_kv_heads)
        return 1

    @staticmethod
    def qkv_bias(hf: Any) -> bool:
        return bool(hf.bias)

    output_bias = qkv_bias

    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        """Slopes are scaled like the scores."""
        spec = super().spec(hf, layer)
        if not hf.alibi:
            return spec
        slopes = tuple(slope * spec.scale for slope in alibi_slopes(self.all_heads))
        return msgspec.structs.replace(spec, alibi_slopes=slopes[self.own.queries])


class TwoNormFalconBlock(ParallelLayerNormBlock):
    norms: ClassVar[tuple[str, ...]] = ("ln_attn", "ln_mlp")


class FalconDecoder(Decoder):
    @classmethod
    def block_of(cls, config: ModelConfig) -> type[Block]:
        hf: Any = config.hf_config
        if not hf.parallel_attn and not hf.new_decoder_architecture:
            return LayerNormBlock
        two = hf.new_decoder_architecture and hf.num_ln_in_parallel_attn in (None, 2)
        return TwoNormFalconBlock if two else ParallelLayerNormBlock

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        rotary = None if config.hf_config.alibi else Rotary(config, build)
        return [rotary] * config.num_layers


class FalconForCausalLM(CausalLM):
    config_fields = {"ffn_hidden_size": INTEGER}
    attention = FalconAttention
    decoder = FalconDecoder
    weight_map = OldWeightMap(
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        prefixes={"transformer.": "model."},
        names={
            "embed_tokens": "word_embeddings", "layers": "h", "norm": "ln_f",
            "self_attn": "self_attention", "qkv_proj": "query_key_value", "o_proj": "dense",
            "up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h",
        },
    )  # fmt: skip

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        return {"qkv_proj": grouped_rows(config, FalconAttention.kv_heads(config))}

    mlp = staticmethod(plain_mlp)
