"""OLMo 2: norms after attention and MLP, and one over all queries and one over all keys."""

from __future__ import annotations

import torch

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.norm import RMSNorm
from ...core.nn.rotary import Rotary
from ...core.parallel.sharding import Sharding
from .decoder import (
    CausalLM,
    Decoder,
    DecoderClassifier,
    HeadlessLM,
    NormedBlock,
    SelfAttention,
)


class AllHeadsRMSNorm(RMSNorm):
    """One norm over heads that ranks divide: each adds up the squares of its own."""

    def __init__(
        self, heads: slice, num_heads: int, head_dim: int, eps: float, build: BuildContext
    ) -> None:
        """`heads`: this rank's; other ranks may have the same ones."""
        group, count = build.ranks.tensor, heads.stop - heads.start
        super().__init__(count * head_dim, eps, build)
        self.group, self.size = group, group.size * count * head_dim
        rows = slice(heads.start * head_dim, heads.stop * head_dim)
        self.shardings = {"weight": Sharding(0, {"": num_heads * head_dim}, {"": (rows,)})}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, heads * head_dim] → the same shape"""
        if self.group.size == 1:
            return super().forward(x)
        wide = x.float()
        squares = self.group.all_reduce(wide.square().sum(-1, keepdim=True))
        wide = wide * torch.rsqrt(squares / self.size + self.eps)
        return (self.weight * wide.to(self.weight.dtype)).to(x.dtype)


class Olmo2Attention(SelfAttention):
    """Attention with one norm over all queries and one over all keys, for any number of heads."""

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
    tensor_parallel = True
    attention = Olmo2Attention
    decoder = Olmo2Decoder


class Olmo2Model(HeadlessLM):
    tensor_parallel = True
    attention = Olmo2Attention
    decoder = Olmo2Decoder


class Olmo2ForSequenceClassification(DecoderClassifier):
    tensor_parallel = True
    attention = Olmo2Attention
    decoder = Olmo2Decoder
