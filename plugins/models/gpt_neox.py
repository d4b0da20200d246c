"""GPT-NeoX and Pythia: layer norms, an MLP without a gate, a part of each head rotated, attention
and MLP side by side over two norms or one after the other; GPT-NeoX-Japanese, nearly without
biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder
from ...core.nn.context import BuildContext
from ...core.nn.linear import Linear
from ...core.nn.mlp import PlainMLP
from ...core.nn.norm import LayerNorm
from .blocks import Block, ParallelBlock
from .decoder import CausalLM, Decoder
from .parts import (
    FusedAttention,
    LayerNormBlock,
    LayerNormDecoder,
    OldWeightMap,
    grouped_rows,
    plain_mlp,
)


class TwoNormBlock(ParallelBlock):
    norm = LayerNorm
    norms = Block.norms


class GptNeoxDecoder(Decoder):
    @classmethod
    def block_of(cls, config: ModelConfig) -> type[Block]:
        return TwoNormBlock if config.hf_config.use_parallel_residual else LayerNormBlock


class GPTNeoXForCausalLM(CausalLM):
    attention: ClassVar[type[FusedAttention]] = FusedAttention
    decoder: ClassVar[type[Decoder]] = GptNeoxDecoder
    weight_map = OldWeightMap(
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        prefixes={"gpt_neox.": "model.", "embed_out.": "lm_head."},
        names={
            "embed_tokens": "embed_in", "norm": "final_layer_norm", "self_attn": "attention",
            "qkv_proj": "query_key_value", "o_proj": "dense",
            "up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h",
        },
        masks=(".attention.bias", ".attention.masked_bias"),
    )  # fmt: skip

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        return {"qkv_proj": grouped_rows(config, config.num_heads)}

    mlp = staticmethod(plain_mlp)


class JapaneseAttention(FusedAttention):
    """Only the last layer's output has a bias."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        if layer == config.num_layers - 1:
            size = config.hidden_size
            self.o_proj = Linear(size, size, build, bias=True, shard="in")

    @staticmethod
    def qkv_bias(hf: object) -> bool:
        return False

    output_bias = qkv_bias


class GPTNeoXJapaneseForCausalLM(GPTNeoXForCausalLM):
    attention = JapaneseAttention
    decoder = LayerNormDecoder
    weight_map = replace(
        GPTNeoXForCausalLM.weight_map,
        prefixes={"gpt_neox_japanese.": "model.", "embed_out.": "lm_head."},
        names={**GPTNeoXForCausalLM.weight_map.names, "o_proj.bias": "dense_bias"},
    )

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        inner = int(hf.hidden_size * hf.intermediate_multiple_size)
        return PlainMLP(hf.hidden_size, inner, hf.hidden_act, build, bias=False)
