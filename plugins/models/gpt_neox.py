"""GPT-NeoX and Pythia: layer norms, an MLP without a gate, a part of each head rotated, attention
and MLP side by side over two norms or one after the other."""

from __future__ import annotations

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder
from ...core.nn.norm import LayerNorm
from .decoder import Block, CausalLM, Decoder, ParallelBlock
from .parts import FusedAttention, LayerNormBlock, OldWeightMap, grouped_rows, plain_mlp


class TwoNormBlock(ParallelBlock):
    norm = LayerNorm
    norms = Block.norms


class GptNeoxDecoder(Decoder):
    @classmethod
    def block_of(cls, config: ModelConfig) -> type[Block]:
        return TwoNormBlock if config.hf_config.use_parallel_residual else LayerNormBlock


class GPTNeoXForCausalLM(CausalLM):
    tensor_parallel = True
    attention = FusedAttention
    decoder = GptNeoxDecoder
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
