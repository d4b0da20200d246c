"""Gemma 2: Gemma with norms behind attention and MLP, too, soft caps, and windows in between."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.mlp import GatedMLP
from ...core.nn.norm import RMSNorm
from ...core.nn.rotary import Rotary
from ...core.protocols import AttentionSpec
from .decoder import CausalLM, DecoderClassifier, HeadlessLM, MakeMLP, SelfAttention
from .gemma import GemmaBlock, GemmaDecoder
from .qwen2 import window_of_layer


class Gemma2Attention(SelfAttention):
    """Its result is not yet added to the stream: a norm comes first."""

    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        """With a scale of the configuration's, and a soft cap."""
        return msgspec.structs.replace(
            super().spec(hf, layer),
            scale=hf.query_pre_attn_scalar**-0.5,
            soft_cap=self.soft_cap(hf),
        )

    @staticmethod
    def soft_cap(hf: Any) -> float | None:
        cap: float | None = hf.attn_logit_softcapping
        return cap

    @staticmethod
    def sliding_window(hf: Any, layer: int) -> int | None:
        return window_of_layer(hf, layer)

    def forward(
        self, hidden: torch.Tensor, norm: RMSNorm, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        """attention(norm(hidden)): [num_tokens, hidden_size] → the same shape."""
        qkv = self.qkv_proj(hidden, norm=norm)
        heads = self.attention(
            qkv, context, rotary=rotary, query_norm=self.q_norm, key_norm=self.k_norm
        )
        out: torch.Tensor = self.o_proj(heads)
        return out


class Gemma2Block(GemmaBlock):
    """Four norms: before and behind attention, before and behind the MLP."""

    mlp: GatedMLP

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        build: BuildContext,
        attention: type[SelfAttention],
        mlp: MakeMLP,
    ) -> None:
        super().__init__(config, layer, build, attention, mlp)
        size, eps = config.hidden_size, config.hf_config.rms_norm_eps
        self.pre_feedforward_layernorm = self.norm(size, eps, build)
        self.post_feedforward_layernorm = self.norm(size, eps, build)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] → the same shape."""
        attended = self.self_attn(hidden, self.input_layernorm, rotary, context)
        hidden = hidden + self.post_attention_layernorm(attended)
        inner = self.mlp.inner(hidden, self.pre_feedforward_layernorm)
        out: torch.Tensor = self.post_feedforward_layernorm(self.mlp.down_proj(inner))
        return hidden + out


class Gemma2Decoder(GemmaDecoder):
    block = Gemma2Block


class Gemma2Model(HeadlessLM):
    attention = Gemma2Attention
    decoder = Gemma2Decoder

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        return GatedMLP(hf.hidden_size, hf.intermediate_size, hf.hidden_activation, build)


class Gemma2ForCausalLM(Gemma2Model, CausalLM):
    """With a soft cap on its logits."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.soft_cap: float | None = config.hf_config.final_logit_softcapping

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] → [num_rows, vocab_size]"""
        logits = super().compute_logits(hidden)
        if self.soft_cap is not None:
            # In place: a vocabulary of 256,000 makes them large.
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits


class Gemma2ForSequenceClassification(Gemma2Model, DecoderClassifier):
    pass
