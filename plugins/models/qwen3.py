"""Qwen3 (dense): a norm on each head's queries and keys, before the rotation."""

from __future__ import annotations

from typing import Any

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.norm import RMSNorm
from ...core.protocols.field_kinds import FLAG
from .decoder import CausalLM, DecoderClassifier, HeadlessLM
from .windows import QWEN_WINDOWS, WindowedAttention


class Qwen3Attention(WindowedAttention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        eps = config.hf_config.rms_norm_eps
        self.q_norm = RMSNorm(self.head_dim, eps, build)
        self.k_norm = RMSNorm(self.head_dim, eps, build)


class Qwen3ForCausalLM(CausalLM):
    config_fields = QWEN_WINDOWS
    attention = Qwen3Attention


class Qwen3Model(HeadlessLM):
    config_fields = QWEN_WINDOWS
    attention = Qwen3Attention


class Qwen3ForSequenceClassification(DecoderClassifier):
    config_fields = QWEN_WINDOWS | {"is_original_qwen3_reranker": FLAG}
    attention = Qwen3Attention

    @classmethod
    def classifier_method(cls, hf_config: Any) -> str | None:
        """Return the method of the family's rerankers, if `hf_overrides` select it."""
        is_reranker = getattr(hf_config, "is_original_qwen3_reranker", False)
        return "from_2_way_softmax" if is_reranker else None
