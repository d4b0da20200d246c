"""Granite with windows and sinks, and HyperCLOVA X: Granite with norms also after attention and
MLP, and multiplied, not divided, logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.rotary import Rotary
from .granite import GraniteAttention, GraniteBlock, GraniteDecoder, GraniteForCausalLM
from .windows import SinkAttention


class GraniteSwaAttention(SinkAttention, GraniteAttention):
    """As Granite's, with windows and sinks."""


class GraniteSwaDecoder(GraniteDecoder):
    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        """A base for each layer; 0 where it does not rotate."""
        bases = getattr(config.hf_config, "layer_rope_theta", None)
        if bases is None:
            return [Rotary(config, build)] * config.num_layers
        rope = config.rope_parameters
        rotaries = {b: Rotary(config, build, rope | {"rope_theta": b}) for b in set(bases) if b}
        return [rotaries.get(base) for base in bases]


class GraniteSWAForCausalLM(GraniteForCausalLM):
    attention = GraniteSwaAttention
    decoder = GraniteSwaDecoder


class ClovaBlock(GraniteBlock):
    norms = (*GraniteBlock.norms, "post_norm1", "post_norm2")
    post_norm1: nn.Module
    post_norm2: nn.Module

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        answer = self.self_attn(hidden, self.input_layernorm, rotary, context, add=False)
        hidden = torch.add(hidden, self.post_norm1(answer), alpha=self.multiplier)
        answer = self.mlp(hidden, self.post_attention_layernorm, add=False)
        return torch.add(hidden, self.post_norm2(answer), alpha=self.multiplier)


class ClovaDecoder(GraniteDecoder):
    @classmethod
    def block_of(cls, config: ModelConfig) -> type[GraniteBlock]:
        return ClovaBlock if config.hf_config.use_post_norm else GraniteBlock


class HyperCLOVAXForCausalLM(GraniteForCausalLM):
    decoder = ClovaDecoder

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.logits_factor = float(config.hf_config.logits_scaling)
