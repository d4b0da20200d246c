"""OPT and BioGPT: learned positions from row 2 on, layer norms, an MLP without a gate, biases."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.norm import LayerNorm
from .blocks import SelfAttention
from .decoder import QKV_SHARDS, CausalLM, Decoder
from .parts import LayerNormBlock, PositionDecoder, plain_mlp

OFFSET = 2
NAMES = {
    "post_attention_layernorm": "final_layer_norm", "input_layernorm": "self_attn_layer_norm",
    "o_proj": "out_proj", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2",
}  # fmt: skip


class OptAttention(SelfAttention):
    @staticmethod
    def qkv_bias(hf: Any) -> bool:
        return bool(getattr(hf, "enable_bias", True))

    output_bias = qkv_bias


class OptBlock(LayerNormBlock):
    @classmethod
    def make_norm(cls, hf: Any, build: BuildContext) -> nn.Module:
        """Create a norm; configurations do not state its eps."""
        return LayerNorm(hf.hidden_size, 1e-5, build)


class OptDecoder(PositionDecoder):
    block = OptBlock
    offset = OFFSET


class OPTForCausalLM(CausalLM):
    ignored_fields = frozenset({"head_dim"})
    attention = OptAttention
    decoder: ClassVar[type[Decoder]] = OptDecoder
    weight_map = WeightMap(
        stacked=QKV_SHARDS,
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        prefixes={
            "model.decoder.final_layer_norm.": "model.norm.", "model.decoder.": "model.",
            "decoder.final_layer_norm.": "model.norm.", "decoder.": "model.",
        },
        names=NAMES,
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf: Any = config.hf_config
        for field, served in (
            ("do_layer_norm_before", True), ("layer_norm_elementwise_affine", True),
            ("_remove_final_layer_norm", False), ("word_embed_proj_dim", hf.hidden_size),
        ):  # fmt: skip
            if (value := getattr(hf, field, served)) != served:
                raise ConfigError(f"{field}: {value!r} is not supported", param=field)
        super().__init__(config, build)

    mlp = staticmethod(plain_mlp)


def scale_of(config: ModelConfig, build: BuildContext) -> float | None:
    return config.hidden_size**0.5 if config.hf_config.scale_embedding else None


class BioGptDecoder(OptDecoder):
    embedding_scale = staticmethod(scale_of)


class BioGptForCausalLM(OPTForCausalLM):
    decoder = BioGptDecoder
    weight_map = WeightMap(
        stacked=QKV_SHARDS,
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        prefixes={"biogpt.layer_norm.": "model.norm.", "biogpt.": "model.",
                  "output_projection.": "lm_head."},
        names=NAMES,
    )  # fmt: skip
