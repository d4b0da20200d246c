"""Qwen2 and Qwen2.5: biases on queries, keys and values; a sliding window on the upper layers."""

from __future__ import annotations

from typing import ClassVar

from .decoder import CausalLM, DecoderClassifier, HeadlessLM, RewardHead, TokenHead
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


class Qwen2ForRewardModel(TokenHead):
    """A reward for each token; the last is that of the text."""

    config_fields = QWEN_WINDOWS
    attention = Qwen2Attention
    head = RewardHead
    num_labels = 1
    activates: ClassVar[bool] = False


class Qwen2ForProcessRewardModel(TokenHead):
    """How likely each step is wrong or right, at the token that ends it."""

    config_fields = QWEN_WINDOWS
    attention = Qwen2Attention
    head = RewardHead
    num_labels = 2
