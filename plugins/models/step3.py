"""Step 3 (text): queries of all heads from one narrow vector, one key and value head, mixtures
beside a shared expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.attention import Attention
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.experts import SparseMLP
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.mlp import GatedMLP
from ...core.nn.norm import RMSNorm
from ...core.nn.rotary import Rotary
from ...core.nn.routing import RoutingRule
from ...core.parallel.sharding import HeadShare
from .blocks import SelfAttention
from .decoder import CausalLM
from .step import Step3p5ForCausalLM


class Step3Attention(SelfAttention):
    """Multi-matrix factorization attention (arXiv 2412.19255). The key head is not sharded."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        nn.Module.__init__(self)
        hf, size = config.hf_config, config.head_dim
        self.ranks, self.head_dim = build.ranks, size
        self.own = HeadShare.of(config.num_heads, 1, build.ranks.tensor)
        self.num_heads, self.num_kv_heads = self.own.num_heads, 1
        rows, width = self.own.rows(size)["q"], config.num_heads * size
        self.narrow = int(hf.share_q_dim or size)
        sizes = {"q": self.narrow, "k": size, "v": size}
        self.qkv_proj = MergedLinear(hf.hidden_size, sizes, build)
        self.inter_norm = RMSNorm(self.narrow, float(hf.rms_norm_eps), build)
        self.wq = Linear(self.narrow, width, build, shard="out", share=rows)
        self.o_proj = Linear(width, hf.hidden_size, build, shard="in", share=rows)
        self.attention = Attention(self.spec(hf, layer), build)
        self.q_norm = self.k_norm = self.sinks = None

    def inner(
        self,
        hidden: torch.Tensor,
        norm: nn.Module | None,
        rotary: Rotary | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        narrow, rest = self.qkv_proj(hidden, norm=norm).tensor_split((self.narrow,), dim=-1)
        queries = self.wq(narrow, norm=self.inter_norm)
        return self.heads(torch.cat([queries, rest], dim=-1), rotary, context)


class Step3TextForCausalLM(CausalLM):
    attention = Step3Attention
    weight_map = Step3p5ForCausalLM.weight_map

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        size = hf.hidden_size
        if layer not in hf.moe_layers:
            return GatedMLP(size, hf.intermediate_size, "silu", build)
        rule = RoutingRule(hf.moe_top_k, renormalize=bool(hf.norm_expert_weight))
        return SparseMLP(
            hf.moe_num_experts, rule, size, hf.moe_intermediate_size, "silu", build,
            shared=GatedMLP(size, hf.share_expert_dim, "silu", build),
        )  # fmt: skip
