"""The first GPT: GPT-2 with norms after each sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.mlp import PlainMLP
from ...core.nn.rotary import Rotary
from ...core.protocols.attention import AttentionSpec
from .blocks import BlockParts, SelfAttention
from .gpt2 import Gpt2Attention, Gpt2Decoder, GPT2LMHeadModel
from .parts import LayerNormBlock

ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}
"""`afn` → its usual name."""


class GptAttention(Gpt2Attention):
    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        return SelfAttention.spec(self, hf, layer)


class GptBlock(LayerNormBlock):
    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        hidden = self.input_layernorm(self.self_attn(hidden, None, rotary, context))
        out: torch.Tensor = self.post_attention_layernorm(self.mlp(hidden, None))
        return out


class GptDecoder(Gpt2Decoder):
    block = GptBlock

    def __init__(self, parts: BlockParts) -> None:
        super().__init__(parts)
        if parts.build.ranks.pipeline.last:
            self.norm = None


NAMES = {
    name: stored for name, stored in GPT2LMHeadModel.weight_map.names.items() if name != "norm"
}  # fmt: skip


class OpenAIGPTLMHeadModel(GPT2LMHeadModel):
    ignored_fields = frozenset({"head_dim"})
    attention: ClassVar[type[Gpt2Attention]] = GptAttention
    decoder = GptDecoder
    weight_map = replace(
        GPT2LMHeadModel.weight_map,
        prefixes={"transformer.": "model."} | {
            f"{part}.": f"model.{part}." for part in ("tokens_embed", "positions_embed", "h")
        },
        names=NAMES | {"embed_tokens": "tokens_embed", "embed_positions": "positions_embed"},
    )  # fmt: skip

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        if hf.afn not in ACTIVATIONS:
            raise ConfigError(f"afn: {hf.afn!r} is not supported", param="afn")
        return PlainMLP(hf.hidden_size, 4 * hf.hidden_size, ACTIVATIONS[hf.afn], build, field="afn")
