"""OLMo 1: Llama with layer norms that have no weight, and limits on queries, keys and values."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...core.nn.context import BuildContext
from .blocks import Block
from .decoder import CausalLM, Decoder
from .parts import ClippedAttention, WeightlessLayerNorm


class OlmoAttention(ClippedAttention):
    @staticmethod
    def clip(hf: Any) -> float | None:
        limit: float | None = hf.clip_qkv
        return limit


class OlmoBlock(Block):
    @classmethod
    def make_norm(cls, hf: Any, build: BuildContext) -> nn.Module:
        return WeightlessLayerNorm(hf.hidden_size, 1e-5, build)


class OlmoDecoder(Decoder):
    block = OlmoBlock


class OlmoForCausalLM(CausalLM):
    attention = OlmoAttention
    decoder = OlmoDecoder
