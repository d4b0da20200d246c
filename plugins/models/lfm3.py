"""LFM3: short convolutions, windows and full attention alternating, with norms also after them, and
a gate per head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.linear import MergedLinear
from ...core.nn.mlp import GatedMLP
from ...core.nn.rotary import Rotary
from .blocks import Block
from .decoder import CausalLM, Decoder, rope_of_type
from .lfm2 import Lfm2Attention, Lfm2Block, Lfm2ForCausalLM
from .windows import window_of_layer


class Lfm3Attention(Lfm2Attention):
    """Each head's output times an optional sigmoid of a number."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        hf: Any = config.hf_config
        self.gated = bool(hf.use_attention_gate)
        if not self.gated:
            return
        if hf.attention_bias:
            raise ConfigError(
                "attention_bias: it is not supported with use_attention_gate",
                param="attention_bias",
            )
        keys = config.num_kv_heads * self.head_dim
        self.qkv_proj = MergedLinear(
            hf.hidden_size,
            {"q": self.all_heads * self.head_dim, "k": keys, "v": keys, "g": self.all_heads},
            build, shard="out", shares={**self.own.rows(self.head_dim), "g": self.own.queries},
        )  # fmt: skip

    @staticmethod
    def sliding_window(hf: Any, layer: int) -> int | None:
        return window_of_layer(hf, layer)

    def heads(
        self, qkv: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        if not self.gated:
            return super().heads(qkv, rotary, context)
        qkv, gate = qkv.tensor_split((-self.num_heads,), dim=-1)
        heads = super().heads(qkv.contiguous(), rotary, context)
        gate = torch.sigmoid(gate.float()).to(heads.dtype)
        return (heads.view(*gate.shape, -1) * gate[:, :, None]).flatten(-2)


class Lfm3Block(Lfm2Block):
    @staticmethod
    def attends(hf: Any, layer: int) -> bool:
        return bool(hf.layer_types[layer] != "conv")


class NormedLfm3Block(Lfm3Block):
    """hidden + norm(f(norm(hidden))), for the mixer and then for the MLP."""

    norms = ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")
    mlp: GatedMLP

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        norms: list[Any] = [getattr(self, name) for name in self.norms]
        pre_attn_norm, post_attn_norm, pre_mlp_norm, post_mlp_norm = norms
        mixed = self.mixer(hidden, pre_attn_norm, rotary, context, add=False)
        hidden = post_attn_norm.add(mixed, hidden)
        out: torch.Tensor = post_mlp_norm.add(self.mlp(hidden, pre_mlp_norm, add=False), hidden)
        return out


class Lfm3Decoder(Decoder):
    @classmethod
    def block_of(cls, config: ModelConfig) -> type[Block]:
        return NormedLfm3Block if config.hf_config.use_sandwich_norm else Lfm3Block

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        hf: Any = config.hf_config
        kinds = sorted(set(hf.layer_types) - {"conv"})
        rotaries = {kind: Rotary(config, build, rope_of_type(hf, kind)) for kind in kinds}
        return [rotaries.get(kind) for kind in hf.layer_types]


class Lfm3ForCausalLM(CausalLM):
    attention = Lfm3Attention
    decoder = Lfm3Decoder
    weight_map = dataclasses.replace(
        Lfm2ForCausalLM.weight_map,
        stacked={**Lfm2ForCausalLM.weight_map.stacked, "gate_proj": Shard("qkv_proj", "g")},
        names={
            "mlp": "feed_forward", "down_proj": "w2", "conv.o_proj": "conv.out_proj",
            "model.norm": "model.embedding_norm",
        },
    )  # fmt: skip

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        return GatedMLP(hf.hidden_size, hf.intermediate_size, "silu", build)
