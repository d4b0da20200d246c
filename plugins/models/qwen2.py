"""Qwen2 and Qwen2.5: biases on queries, keys and values; a sliding window on the upper layers."""

from __future__ import annotations

from .decoder import CausalLM, DecoderClassifier, HeadlessLM
from .windows import QWEN_WINDOWS, WindowedAttention


class Qwen2Attention(WindowedAttention):
    @staticmethod
    def qkv_bias(hf: object) -> bool:
        return True

    @staticmethod
    def output_bias(hf: object) -> bool:
        return False


class Qwen2ForCausalLM(CausalLM):
    config_fields = QWEN_WINDOWS
    attention = Qwen2Attention


class Qwen2Model(HeadlessLM):
    config_fields = QWEN_WINDOWS
    attention = Qwen2Attention


class Qwen2ForSequenceClassification(DecoderClassifier):
    config_fields = QWEN_WINDOWS
    attention = Qwen2Attention
