"""Llama-Nemotron Super and Ultra (DeciLM): Llama whose layers have sizes of their own, and may lack
attention or an MLP."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.mlp import GatedMLP
from ...core.nn.rotary import Rotary
from .blocks import Block, BlockParts, SelfAttention
from .decoder import CausalLM, Decoder

ROWS = 256
"""Widths of MLPs are multiples of this."""


def part_of(hf: Any, layer: int, part: str) -> dict[str, Any] | None:
    """Return a layer's "attention" or "ffn" in `block_configs`; None: the layer has none. Raises
    ConfigError.
    """
    own: dict[str, Any] = hf.block_configs[layer][part]
    if own.get("replace_with_linear"):
        raise ConfigError(
            f"block_configs: layer {layer} has replace_with_linear, which is not supported",
            param="block_configs",
        )
    return None if own.get("no_op") else own


def inner_size(ffn: dict[str, Any], hidden_size: int) -> int:
    """Return the width of an MLP, as stated or from `ffn_mult`."""
    if ffn.get("ffn_mult") is None:
        return int(ffn["intermediate_size"])
    return -(-int(2 * ffn["ffn_mult"] * hidden_size / 3) // ROWS) * ROWS


class DeciAttention(SelfAttention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        own = part_of(config.hf_config, layer, "attention")
        assert own is not None, "the block asks only for what there is"
        hf = copy.copy(config.hf_config)
        hf.num_key_value_heads = config.num_heads // own["n_heads_in_group"]
        super().__init__(replace(config, hf_config=hf), layer, build)


class DeciBlock(Block):
    def __init__(self, parts: BlockParts, layer: int) -> None:
        nn.Module.__init__(self)
        hf, build = parts.config.hf_config, parts.build
        self.has = tuple(part_of(hf, layer, part) is not None for part in ("attention", "ffn"))
        if self.has[0]:
            self.input_layernorm = self.make_norm(hf, build)
            self.self_attn = parts.make_attention(layer)
        if self.has[1]:
            self.post_attention_layernorm = self.make_norm(hf, build)
            self.mlp = parts.make_mlp(layer)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        attends, has_mlp = self.has
        if attends:
            hidden = self.self_attn(hidden, self.input_layernorm, rotary, context)
        return self.mlp(hidden, self.post_attention_layernorm) if has_mlp else hidden


class DeciDecoder(Decoder):
    block = DeciBlock


class DeciLMForCausalLM(CausalLM):
    attention = DeciAttention
    decoder = DeciDecoder

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        own = part_of(hf, layer, "ffn")
        assert own is not None, "the block asks only for what there is"
        act = own.get("hidden_act") or hf.hidden_act
        return GatedMLP(hf.hidden_size, inner_size(own, hf.hidden_size), act, build)
