"""Gemma 2: Gemma with norms also after attention and MLP, soft caps, and alternating windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.mlp import GatedMLP
from ...core.nn.norm import OffsetRMSNorm
from ...core.protocols.attention import AttentionSpec
from ...core.protocols.field_kinds import NUMBER, POSITIVE, TEXT
from ...core.protocols.models import HiddenStates
from .blocks import NormedBlock
from .decoder import CausalLM, DecoderClassifier, HeadlessLM
from .gemma import GemmaAttention, GemmaDecoder
from .windows import WindowedAttention


class Gemma2Attention(WindowedAttention, GemmaAttention):
    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        return msgspec.structs.replace(
            super().spec(hf, layer),
            scale=hf.query_pre_attn_scalar**-0.5,
            soft_cap=self.soft_cap(hf),
        )

    @staticmethod
    def soft_cap(hf: Any) -> float | None:
        cap: float | None = hf.attn_logit_softcapping
        return cap


class Gemma2Block(NormedBlock):
    norm = OffsetRMSNorm
    norms = (
        "input_layernorm", "post_attention_layernorm",
        "pre_feedforward_layernorm", "post_feedforward_layernorm",
    )  # fmt: skip


class Gemma2Decoder(GemmaDecoder):
    block = Gemma2Block


class Gemma2Model(HeadlessLM):
    config_fields = {
        "attn_logit_softcapping": NUMBER,
        "final_logit_softcapping": NUMBER,
        "hidden_activation": TEXT,
        "query_pre_attn_scalar": POSITIVE,
    }
    attention = Gemma2Attention
    decoder: ClassVar[type[GemmaDecoder]] = Gemma2Decoder

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        return GatedMLP(
            hf.hidden_size,
            hf.intermediate_size,
            hf.hidden_activation,
            build,
            field="hidden_activation",
        )


def soft_capped(cap: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return cap * tanh(x / cap) of x, in place: a vocabulary of 256,000 makes logits large."""
    return lambda x: x.div_(cap).tanh_().mul_(cap)


class Gemma2ForCausalLM(Gemma2Model, CausalLM):
    finishes = True

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.soft_cap: float | None = config.hf_config.final_logit_softcapping
        self.operations = build.operations

    def compute_logits(self, hidden: HiddenStates) -> torch.Tensor:
        logits = super().compute_logits(hidden)
        if self.soft_cap is not None:
            logits = self.operations.pointwise(soft_capped(self.soft_cap), logits)
        return logits


class Gemma2ForSequenceClassification(Gemma2Model, DecoderClassifier):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        if self.tokens is not None and config.hf_config.final_logit_softcapping is not None:
            raise ConfigError(
                "hf_overrides: classifier_from_token compares logits, which this model caps; with "
                "final_logit_softcapping null they are compared without the cap",
                param="hf_overrides",
            )
