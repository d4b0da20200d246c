"""SmolLM3: Llama without rotation in some layers, with optional windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.rotary import Rotary
from .blocks import SelfAttention
from .decoder import CausalLM, Decoder
from .windows import QWEN_WINDOWS, window_of_layer


class SmolLM3Attention(SelfAttention):
    @staticmethod
    def sliding_window(hf: Any, layer: int) -> int | None:
        return window_of_layer(hf, layer) if hf.use_sliding_window else None


class SmolLM3Decoder(Decoder):
    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        """`no_rope_layers` has a 1 for rotated layers."""
        rotary = Rotary(config, build)
        return [rotary if flag else None for flag in config.hf_config.no_rope_layers]


class SmolLM3ForCausalLM(CausalLM):
    config_fields = QWEN_WINDOWS
    attention = SmolLM3Attention
    decoder = SmolLM3Decoder
