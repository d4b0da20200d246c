"""Qwen2 and Qwen2.5: biases on queries, keys and values; a sliding window on the upper layers."""

from __future__ import annotations

from typing import Any

from .decoder import CausalLM, DecoderClassifier, HeadlessLM, SelfAttention


class Qwen2Attention(SelfAttention):
    @staticmethod
    def qkv_bias(hf: object) -> bool:
        return True

    @staticmethod
    def output_bias(hf: object) -> bool:
        return False

    @staticmethod
    def sliding_window(hf: Any, layer: int) -> int | None:
        return window_of_layer(hf, layer)


class Qwen2ForCausalLM(CausalLM):
    tensor_parallel = True
    attention = Qwen2Attention


class Qwen2Model(HeadlessLM):
    tensor_parallel = True
    attention = Qwen2Attention


class Qwen2ForSequenceClassification(DecoderClassifier):
    tensor_parallel = True
    attention = Qwen2Attention


def window_of_layer(hf: Any, layer: int) -> int | None:
    """Return the window by `layer_types` if the configuration has them (as `transformers` fills
    them in)."""
    types = getattr(hf, "layer_types", None)
    if types and types[layer] == "sliding_attention":
        window: int | None = hf.sliding_window
        return window
    return None
