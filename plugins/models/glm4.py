"""GLM-4 (0414): four norms per block, gate and up as one tensor, rotary pairs of neighbours."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.mlp import GatedMLP
from ...core.nn.rotary import Rotary
from .blocks import NormedBlock, SelfAttention
from .decoder import QKV_SHARDS, CausalLM, Decoder, DecoderClassifier, HeadlessLM


class Glm4Attention(SelfAttention):
    """Attention that rotates pairs of neighbours: the kernels pair halves, so the channels of
    queries and keys are reordered, which leaves their products unchanged.
    """

    @staticmethod
    def output_bias(hf: object) -> bool:
        return False

    def heads(
        self, qkv: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        assert rotary is not None, "all layers rotate"
        turned = heads[:, : self.num_heads + self.num_kv_heads, : rotary.rotary_dim]
        turned.copy_(torch.cat([turned[..., ::2], turned[..., 1::2]], dim=-1))
        return super().heads(qkv, rotary, context)


class Glm4Block(NormedBlock):
    norms = (
        "input_layernorm", "post_self_attn_layernorm",
        "post_attention_layernorm", "post_mlp_layernorm",
    )  # fmt: skip


class Glm4Decoder(Decoder):
    block = Glm4Block


class Glm4Model(HeadlessLM):
    attention = Glm4Attention
    decoder: ClassVar[type[Decoder]] = Glm4Decoder
    weight_map = WeightMap(
        stacked=QKV_SHARDS,
        tied=HeadlessLM.weight_map.tied,
        prefixes=HeadlessLM.weight_map.prefixes,
    )

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        return GatedMLP(hf.hidden_size, hf.intermediate_size, hf.hidden_act, build, whole=True)


class Glm4ForCausalLM(Glm4Model, CausalLM):
    pass


class GlmOcrAttention(Glm4Attention):
    @staticmethod
    def qkv_bias(hf: object) -> bool:
        return False


class GlmOcrTextForCausalLM(Glm4ForCausalLM):
    """The text part of GLM-OCR, without the layer behind the last one, which predicts further
    tokens."""

    attention = GlmOcrAttention

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        further = f"model.layers.{config.num_layers}."
        self.weight_map = dataclasses.replace(self.weight_map, ignored=(further,))


class Glm4ForSequenceClassification(Glm4Model, DecoderClassifier):
    pass
