"""Orion: Llama with layer norms."""

from __future__ import annotations

from .decoder import CausalLM
from .parts import LayerNormDecoder


class OrionForCausalLM(CausalLM):
    decoder = LayerNormDecoder
