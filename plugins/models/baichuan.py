"""Baichuan 1 and 2: Llama with queries, keys and values as one tensor. The 13B models have slopes
instead of a rotation; the head of 2 has rows of length 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch.nn.functional as F

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.rotary import Rotary
from ...core.parallel.missing_layer import MissingLayer
from ...core.protocols.attention import AttentionSpec
from .decoder import CausalLM, Decoder, HeadlessLM
from .parts import FusedAttention, alibi_slopes

ROTATED_SIZE = 4096
"""hidden_size of the 7B models: configurations do not name the kind of positions."""
VOCAB_OF_2 = 125696
"""vocab_size of Baichuan 2."""


def rotates(hf: Any) -> bool:
    return bool(hf.hidden_size <= ROTATED_SIZE)


class BaichuanAttention(FusedAttention):
    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        slopes = None if rotates(hf) else alibi_slopes(self.all_heads)[self.own.queries]
        return msgspec.structs.replace(super().spec(hf, layer), alibi_slopes=slopes)


class BaichuanDecoder(Decoder):
    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        rotary = Rotary(config, build) if rotates(config.hf_config) else None
        return [rotary] * config.num_layers


class BaichuanForCausalLM(CausalLM):
    attention = BaichuanAttention
    decoder = BaichuanDecoder
    weight_map = replace(HeadlessLM.weight_map, names={"qkv_proj": "W_pack"})

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.unit_rows = config.vocab_size == VOCAB_OF_2

    def after_loading(self) -> None:
        if self.unit_rows and not isinstance(self.lm_head, MissingLayer):
            weight = self.lm_head.weight
            weight.data.copy_(F.normalize(weight.data))
