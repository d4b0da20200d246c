"""NanoChat: norms without weights, also of heads after the rotation, which is reversed; an MLP
without a gate, capped logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.mlp import PlainMLP
from ...core.nn.rotary import Rotary
from ...core.protocols.field_kinds import NUMBER
from ...core.protocols.models import HiddenStates
from .blocks import Block, BlockParts
from .decoder import QKV_SHARDS, CausalLM, Decoder, HeadlessLM
from .gemma2 import soft_capped
from .parts import RotatedFirstAttention, WeightlessRMSNorm


class NanoChatAttention(RotatedFirstAttention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        eps = config.hf_config.rms_norm_eps
        self.q_norm = self.k_norm = WeightlessRMSNorm(self.head_dim, eps, build)


class BackwardRotary(Rotary):
    def make_table(self, num_positions: int) -> torch.Tensor:
        table = super().make_table(num_positions)
        table[:, self.rotary_dim // 2 :].neg_()
        return table


class NanoChatBlock(Block):
    norm = WeightlessRMSNorm


class NanoChatDecoder(Decoder):
    block = NanoChatBlock

    def __init__(self, parts: BlockParts) -> None:
        super().__init__(parts)
        self.embedding_norm = self.block.make_norm(parts.config.hf_config, parts.build)

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        return [BackwardRotary(config, build)] * config.num_layers

    def embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.embedding_norm(super().embed(input_ids, positions))
        return normed


class NanoChatForCausalLM(CausalLM):
    finishes = True
    config_fields = {"final_logit_softcapping": NUMBER}
    attention = NanoChatAttention
    decoder = NanoChatDecoder
    weight_map = WeightMap(
        stacked=QKV_SHARDS,
        tied=HeadlessLM.weight_map.tied,
        names={"up_proj": "fc1", "down_proj": "fc2"},
    )

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        return PlainMLP(hf.hidden_size, hf.intermediate_size, hf.hidden_act, build, bias=False)

    def compute_logits(self, hidden: HiddenStates) -> torch.Tensor:
        logits, cap = super().compute_logits(hidden), self.soft_cap
        return logits if cap is None else self.operations.pointwise(soft_capped(cap), logits)

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.soft_cap: float | None = config.hf_config.final_logit_softcapping
        self.operations = build.operations
