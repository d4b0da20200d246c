"""VaultGemma: Gemma 2 without the norms after attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from .decoder import HeadlessLM
from .gemma import GemmaDecoder
from .gemma2 import Gemma2ForCausalLM


class VaultGemmaForCausalLM(Gemma2ForCausalLM):
    decoder = GemmaDecoder
    weight_map = replace(
        HeadlessLM.weight_map, names={"post_attention_layernorm": "pre_feedforward_layernorm"}
    )
