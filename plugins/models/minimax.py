"""MiniMax-Text-01 and MiniMax-M1: lightning attention in most layers, attention in some, experts in
each."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.rotary import Rotary
from ...core.nn.state.lightning import LightningAttention
from .blocks import BlockParts
from .decoder import Decoder
from .mixer import HybridBlock
from .mixtral import MixtralForCausalLM

NORM_EPS = 1e-6
"""Eps of lightning attention's norm, instead of `rms_norm_eps`."""
CONSTANTS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Tensors of lightning attention that follow from its sizes; some checkpoints have them."""


def slopes(num_heads: int, layer: int, num_layers: int) -> tuple[float, ...]:
    """Return each head's rate of decay: ALiBi's slope, smaller in later layers."""
    factor = 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
    return tuple(2.0 ** (-8.0 * (head + 1) / num_heads) * factor for head in range(num_heads))


class MiniMaxBlock(HybridBlock):
    """alpha * x + beta * f(x) of the normed x, for the mixer and then for the experts."""

    state_name = "self_attn"
    mlp: nn.Module

    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__(parts, layer)
        hf = parts.config.hf_config
        kind = "full" if self.attends(hf, layer) else "linear"
        names = (f"{kind}_attn_alpha_factor", f"{kind}_attn_beta_factor")
        self.alpha, self.beta = (float(getattr(hf, name)) for name in names)
        self.mlp_alpha, self.mlp_beta = float(hf.mlp_alpha_factor), float(hf.mlp_beta_factor)

    def make_mixer(self, parts: BlockParts, layer: int) -> nn.Module:
        config, hf = parts.config, parts.config.hf_config
        return LightningAttention(
            hf.hidden_size, slopes(config.num_heads, layer, hf.num_hidden_layers), config.head_dim,
            parts.build, eps=NORM_EPS,
        )  # fmt: skip

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        x = self.input_layernorm(hidden)
        answer = self.mixer(x, None, rotary, context, add=False)
        x = self.post_attention_layernorm(self.alpha * x + self.beta * answer)
        answer = self.mlp(x, None, add=False)
        out: torch.Tensor = self.mlp_alpha * x + self.mlp_beta * answer
        return out


class MiniMaxDecoder(Decoder):
    block = MiniMaxBlock

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> list[Rotary | None]:
        """`rotary_dim` may limit the rotated channels."""
        rope = dict(config.rope_parameters)
        if width := getattr(config.hf_config, "rotary_dim", None):
            rope["partial_rotary_factor"] = int(width) / config.head_dim
        return [Rotary(config, build, rope)] * config.num_layers


class MiniMaxForCausalLM(MixtralForCausalLM):
    decoder = MiniMaxDecoder

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf: Any = config.hf_config
        for field, served in (("postnorm", True), ("shared_intermediate_size", 0)):
            value = getattr(hf, field, served)
            if value not in (served, [served] * config.num_layers):
                raise ConfigError(f"{field}: {value!r} is not supported", param=field)
        super().__init__(config, build)
        places = [f"model.layers.{layer}.self_attn.{name}" for layer in range(config.num_layers)
                  for name in CONSTANTS]  # fmt: skip
        self.weight_map = dataclasses.replace(self.weight_map, ignored=tuple(places))

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        """Lightning attention's queries, keys and values are interleaved by head."""
        return {"qkv_proj": RowOrder.by_part(config.num_heads, 3, config.head_dim)}
