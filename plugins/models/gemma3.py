"""Gemma 3, text: Gemma 2 with norms of queries and keys in place of caps, and two rotations."""

from __future__ import annotations

from typing import Any

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.norm import OffsetRMSNorm
from ...core.protocols.field_kinds import NUMBER
from .decoder import rotaries_by_type
from .gemma2 import (
    Gemma2Attention,
    Gemma2Decoder,
    Gemma2ForCausalLM,
    Gemma2ForSequenceClassification,
    Gemma2Model,
)


class Gemma3Attention(Gemma2Attention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        eps = config.hf_config.rms_norm_eps
        self.q_norm = OffsetRMSNorm(self.head_dim, eps, build)
        self.k_norm = OffsetRMSNorm(self.head_dim, eps, build)

    @staticmethod
    def soft_cap(hf: Any) -> float | None:
        """Always None: the field is left over from Gemma 2."""
        return None


class Gemma3Decoder(Gemma2Decoder):
    """Layers with a window rotate by another base."""

    rotaries_of = staticmethod(rotaries_by_type)


class Gemma3TextModel(Gemma2Model):
    config_fields = {"rope_local_base_freq": NUMBER}
    attention = Gemma3Attention
    decoder = Gemma3Decoder


class Gemma3ForCausalLM(Gemma3TextModel, Gemma2ForCausalLM):
    """Without a cap on logits."""


class Gemma3TextForSequenceClassification(Gemma3TextModel, Gemma2ForSequenceClassification):
    pass
