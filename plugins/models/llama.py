"""Llama 2 and 3, and everything published under LlamaForCausalLM."""

from __future__ import annotations

from .decoder import CausalLM, DecoderClassifier, HeadlessLM


class LlamaForCausalLM(CausalLM):
    """Llama; biases, head size and rope variant come from the configuration."""

    tensor_parallel = True


class LlamaModel(HeadlessLM):
    """The same without a head, for embeddings."""

    tensor_parallel = True


class LlamaForSequenceClassification(DecoderClassifier):
    """The same with a classifier, for labels and scores."""

    tensor_parallel = True
