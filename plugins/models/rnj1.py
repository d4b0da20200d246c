"""Rnj-1: Gemma 3 whose local layers attend to a token's own chunk and to the one before it."""

from __future__ import annotations

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.rotary import Rotary
from .decoder import rope_of_type
from .gemma3 import Gemma3Attention, Gemma3Decoder, Gemma3ForCausalLM
from .windows import ChunkedAttention


class Rnj1Attention(ChunkedAttention, Gemma3Attention):
    """`sliding_window` tokens are two chunks. Source: vLLM's rnj1.py (`chunk_lookback`)."""

    chunk_field = "sliding_window"
    chunk_lookback = 1


class Rnj1Decoder(Gemma3Decoder):
    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> list[Rotary]:
        """Layer types without rope parameters use those of the window layers, as in Gemma 3."""
        hf = config.hf_config
        rope = hf.rope_parameters or {}
        own = {kind: kind if kind in rope else "sliding_attention" for kind in hf.layer_types}
        rotaries = {
            kind: Rotary(config, build, rope_of_type(hf, own[kind])) for kind in sorted(own)
        }
        return [rotaries[kind] for kind in hf.layer_types]


class Rnj1ForCausalLM(Gemma3ForCausalLM):
    attention = Rnj1Attention
    decoder = Rnj1Decoder
