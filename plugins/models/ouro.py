"""Ouro: a decoder that runs several times over each token, with a cache per time."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.attention import Attention
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.norm import RMSNorm
from ...core.nn.rotary import Rotary
from ...core.protocols.field_kinds import FLAG, SIZE
from .blocks import NormedBlock, SelfAttention
from .decoder import CausalLM
from .looped import LoopedDecoder


class OuroAttention(SelfAttention):
    """Has its own keys and values in each loop."""

    attention: Any

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        spec, count = self.attention.spec, config.hf_config.total_ut_steps
        self.attention = nn.ModuleList(Attention(spec, build) for _ in range(count))


class OuroBlock(NormedBlock):
    norms = (
        "input_layernorm", "input_layernorm_2",
        "post_attention_layernorm", "post_attention_layernorm_2",
    )  # fmt: skip
    input_layernorm_2: RMSNorm
    post_attention_layernorm_2: RMSNorm
    self_attn: OuroAttention

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: Rotary | None,
        context: ForwardContext,
        loop: int = 0,
    ) -> torch.Tensor:
        attention = self.self_attn
        qkv = attention.qkv_proj(hidden, norm=self.input_layernorm)
        heads = attention.attention[loop](qkv, context, rotary=rotary)
        hidden = self.input_layernorm_2.add(attention.project(heads), hidden)
        answer = self.mlp(hidden, self.post_attention_layernorm, add=False)
        return self.post_attention_layernorm_2.add(answer, hidden)


class OuroDecoder(LoopedDecoder):
    block = OuroBlock
    loops_field = "total_ut_steps"

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens] → [num_tokens, hidden_size]; normed after all loops but the last."""
        hidden = self.embed(input_ids, context.positions)
        layers = self.unlike_layers() if context.precompiling else self.stage_layers()
        for loop in range(self.num_loops):
            hidden = self.norm(hidden) if loop else hidden
            for layer, rotary in layers:
                hidden = layer(hidden, rotary, context, loop)
        return hidden


class OuroForCausalLM(CausalLM):
    """Runs all loops for every token: the gate for early exit is not loaded."""

    config_fields = {"total_ut_steps": SIZE.not_null(), "use_sliding_window": FLAG}
    attention = OuroAttention
    decoder = OuroDecoder
    weight_map = dataclasses.replace(CausalLM.weight_map, ignored=("model.early_exit_gate.",))

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf = config.hf_config
        for field, served in (("early_exit_threshold", 1.0), ("use_sliding_window", False)):
            if (value := getattr(hf, field, served)) != served:
                raise ConfigError(f"{field}: {value} is not supported, only {served}", param=field)
        super().__init__(config, build)
