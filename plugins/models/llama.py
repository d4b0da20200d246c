"""Llama 2 and 3, and everything published under LlamaForCausalLM."""

from __future__ import annotations

from .decoder import CausalLM, DecoderClassifier, HeadlessLM


class LlamaForCausalLM(CausalLM):
    """Llama; biases, head size and rope variant come from the configuration."""


class LlamaModel(HeadlessLM):
    pass


class LlamaForSequenceClassification(DecoderClassifier):
    pass
