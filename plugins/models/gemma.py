"""Gemma: Llama with scaled embeddings, norms around one, and gelu in the MLP."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.norm import OffsetRMSNorm
from .decoder import Block, CausalLM, Decoder, DecoderClassifier, HeadlessLM, MakeMLP, SelfAttention


class GemmaBlock(Block):
    norm = OffsetRMSNorm


class GemmaDecoder(Decoder):
    """Embeddings are multiplied by sqrt(hidden_size), rounded to the model's type."""

    block: ClassVar[type[Block]] = GemmaBlock

    def __init__(
        self,
        config: ModelConfig,
        build: BuildContext,
        attention: type[SelfAttention],
        mlp: MakeMLP,
    ) -> None:
        if getattr(config.hf_config, "use_bidirectional_attention", None):
            raise ConfigError(
                "use_bidirectional_attention: true is not supported, only attention to what came "
                "before",
                param="use_bidirectional_attention",
            )
        super().__init__(config, build, attention, mlp)
        self.scale = float(torch.tensor(config.hidden_size**0.5).to(build.dtype))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] → [num_tokens, hidden_size]"""
        return super().embed(input_ids) * self.scale


class GemmaModel(HeadlessLM):
    decoder = GemmaDecoder


class GemmaForCausalLM(GemmaModel, CausalLM):
    """The head is the embedding, not scaled."""


class GemmaForSequenceClassification(GemmaModel, DecoderClassifier):
    pass
