"""OLMo 2: norms after attention and MLP, and one over all queries and one over all keys."""

from __future__ import annotations

import torch

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.norm import AllHeadsRMSNorm, RMSNorm
from ...core.nn.rotary import Rotary
from .blocks import NormedBlock, SelfAttention
from .decoder import CausalLM, Decoder, DecoderClassifier, HeadlessLM


class Olmo2Attention(SelfAttention):
    q_norm: RMSNorm
    k_norm: RMSNorm

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        eps = config.hf_config.rms_norm_eps
        heads, num_kv_heads = config.num_heads, self.kv_heads(config)
        self.q_norm = AllHeadsRMSNorm(self.own.queries, heads, self.head_dim, eps, build)
        self.k_norm = AllHeadsRMSNorm(self.own.keys, num_kv_heads, self.head_dim, eps, build)

    def heads(
        self, qkv: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        query, key = qkv[:, :queries], qkv[:, queries : queries + keys]
        query.copy_(self.q_norm(query))
        key.copy_(self.k_norm(key))
        out: torch.Tensor = self.attention(qkv, context, rotary=rotary)
        return out


class Olmo2Block(NormedBlock):
    norms = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")


class Olmo2Decoder(Decoder):
    block = Olmo2Block


class Olmo2ForCausalLM(CausalLM):
    attention = Olmo2Attention
    decoder = Olmo2Decoder


class Olmo2Model(HeadlessLM):
    attention = Olmo2Attention
    decoder = Olmo2Decoder


class Olmo2ForSequenceClassification(DecoderClassifier):
    attention = Olmo2Attention
    decoder = Olmo2Decoder
