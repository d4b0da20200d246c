"""Gemma: Llama with scaled embeddings, norms with offset weights, and gelu in the MLP."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.norm import OffsetRMSNorm
from ...core.protocols.attention import AttentionSpec
from .blocks import Block, SelfAttention
from .decoder import CausalLM, Decoder, DecoderClassifier, HeadlessLM


class GemmaAttention(SelfAttention):
    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        """Raises ConfigError if a layer must attend to later tokens."""
        if getattr(hf, "use_bidirectional_attention", None):
            raise ConfigError(
                "use_bidirectional_attention: true is not supported, only attention to what came "
                "before",
                param="use_bidirectional_attention",
            )
        return super().spec(hf, layer)


class GemmaBlock(Block):
    norm = OffsetRMSNorm


class GemmaDecoder(Decoder):
    block: ClassVar[type[Block]] = GemmaBlock

    @staticmethod
    def embedding_scale(config: ModelConfig, build: BuildContext) -> float:
        """sqrt(hidden_size), rounded to the model's dtype."""
        return float(torch.tensor(config.hidden_size**0.5).to(build.dtype))


class GemmaModel(HeadlessLM):
    attention = GemmaAttention
    decoder = GemmaDecoder


class GemmaForCausalLM(GemmaModel, CausalLM):
    """Its head is the unscaled embedding."""


class GemmaForSequenceClassification(GemmaModel, DecoderClassifier):
    pass
