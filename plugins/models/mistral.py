"""Mistral: Llama with a sliding window."""

from __future__ import annotations

from typing import Any

from .blocks import SelfAttention
from .decoder import CausalLM, DecoderClassifier, HeadlessLM


class MistralAttention(SelfAttention):
    @staticmethod
    def qkv_bias(hf: object) -> bool:
        return False

    @staticmethod
    def output_bias(hf: object) -> bool:
        return False

    @staticmethod
    def sliding_window(hf: Any, layer: int) -> int | None:
        window: int | None = getattr(hf, "sliding_window", None)
        return window


class MistralForCausalLM(CausalLM):
    attention = MistralAttention


class MistralModel(HeadlessLM):
    attention = MistralAttention


class MistralForSequenceClassification(DecoderClassifier):
    attention = MistralAttention
