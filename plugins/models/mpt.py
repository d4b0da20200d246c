"""MPT: slopes for positions, layer norms without biases, an MLP without a gate, no biases."""

from __future__ import annotations

from typing import Any

import msgspec
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.mlp import PlainMLP
from ...core.nn.norm import BiaslessLayerNorm
from ...core.protocols.attention import AttentionSpec
from ...core.protocols.field_kinds import INTEGER
from .blocks import Block
from .decoder import CausalLM
from .parts import ClippedAttention, FusedAttention, UnrotatedDecoder, alibi_slopes


class MptAttention(ClippedAttention, FusedAttention):
    @staticmethod
    def clip(hf: Any) -> float | None:
        limit: float | None = hf.attn_config.clip_qkv
        return limit

    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        options = hf.attn_config
        for field, served in (("alibi", True), ("qk_ln", False), ("prefix_lm", False)):
            if bool(getattr(options, field, served)) is not served:
                name = f"attn_config.{field}"
                raise ConfigError(f"{name}: {not served} is not supported", param=name)
        spec = super().spec(hf, layer)
        return msgspec.structs.replace(
            spec,
            scale=options.softmax_scale or spec.scale,
            alibi_slopes=alibi_slopes(self.all_heads, options.alibi_bias_max)[self.own.queries],
        )


class MptBlock(Block):
    norm = BiaslessLayerNorm


class MptDecoder(UnrotatedDecoder):
    block = MptBlock


class MptForCausalLM(CausalLM):
    ignored_fields = frozenset({"head_dim"})
    config_fields = {"max_seq_len": INTEGER}
    attention = MptAttention
    decoder = MptDecoder
    weight_map = WeightMap(
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        prefixes={"transformer.": "model."},
        names={
            "embed_tokens": "wte", "layers": "blocks", "norm": "norm_f",
            "input_layernorm": "norm_1", "post_attention_layernorm": "norm_2",
            "self_attn": "attn", "qkv_proj": "Wqkv", "o_proj": "out_proj", "mlp": "ffn",
        },
    )  # fmt: skip

    @classmethod
    def context_length(cls, hf_config: Any) -> int | None:
        length: int | None = hf_config.max_seq_len
        return length

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        size = config.hidden_size
        return PlainMLP(size, hf.expansion_ratio * size, "gelu", build, bias=False)
