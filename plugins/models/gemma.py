"""Gemma: Llama with scaled embeddings, norms with offset weights, and gelu in the MLP."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.norm import OffsetRMSNorm
from .blocks import Block, SelfAttention
from .decoder import CausalLM, Decoder, DecoderClassifier, HeadlessLM


class GemmaAttention(SelfAttention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        """Raises ConfigError if a layer must attend to later tokens, but for those of a prompt."""
        field = "use_bidirectional_attention"
        if getattr(config.hf_config, field, None) and not config.whole_prompts:
            raise ConfigError(
                f"{field}: true is not supported, only attention to what came before", param=field
            )
        super().__init__(config, layer, build)


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
