"""JetMoe: a mixture of attentions, which share keys and values, and a mixture of MLPs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder, Shard, StackedExperts, WeightMap
from ...core.nn.attention import Attention
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.experts import Router, SparseMLP
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.rotary import Rotary
from ...core.nn.routing import RoutingRule
from ...core.parallel.sharding import HeadShare
from .blocks import Block, BlockParts, SelfAttention
from .decoder import CausalLM, Decoder
from .expert_fields import EXPERTS

NORM_EPS = 1e-6
"""Eps of a block's norms, instead of `rms_norm_eps`."""


class JetMoeAttention(SelfAttention):
    """Each token chooses experts, which have queries and an output projection for every key.

    Queries of all experts are computed in one product, and so are outputs, from zeros for unchosen
    experts. A key has a query head for each choice. Ranks divide the keys.
    """

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        nn.Module.__init__(self)
        hf, size = config.hf_config, config.head_dim
        self.ranks, self.operations, self.head_dim = build.ranks, build.operations, size
        keys, experts = config.num_kv_heads, hf.num_local_experts
        self.rule = RoutingRule(hf.num_experts_per_tok, renormalize=True)
        self.num_experts = experts
        self.own = HeadShare.of(keys, keys, build.ranks.tensor)
        self.num_kv_heads = self.own.num_kv_heads
        self.num_heads = self.num_kv_heads * self.rule.top_k
        width, share = keys * experts * size, self.own.rows(experts * size)["k"]
        self.gate = Router(experts, hf.hidden_size, build)
        self.query_proj = Linear(hf.hidden_size, width, build, shard="out", share=share)
        rows = self.own.rows(size)
        self.kv_proj = MergedLinear(
            hf.hidden_size, {"k": keys * size, "v": keys * size}, build, shard="out",
            shares={"k": rows["k"], "v": rows["v"]}, whole=True,
        )  # fmt: skip
        self.o_proj = Linear(width, hf.hidden_size, build, shard="in", share=share)
        self.bias = nn.Parameter(build.empty(hf.hidden_size))
        self.attention = Attention(self.spec(hf, layer), build)
        self.q_norm = self.k_norm = self.sinks = None

    def project(self, heads: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """As `SelfAttention.project`, with a bias."""
        return super().project(heads, residual) + self.bias

    def inner(
        self,
        hidden: torch.Tensor,
        norm: nn.Module | None,
        rotary: Rotary | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] → [num_tokens, num_kv_heads * num_experts * head_dim], zeros
        for unchosen experts
        """
        x = hidden if norm is None else norm(hidden)
        routing = self.operations.route(self.gate(x), self.rule)
        # In range also where a kernel that is only compiled has written nothing.
        chosen = routing.experts.long().clamp(0, self.num_experts - 1)
        keys = self.num_kv_heads
        queries = self.query_proj(x).view(len(x), keys, self.num_experts, self.head_dim)
        index = chosen[:, None, :, None].expand(-1, keys, -1, self.head_dim)
        qkv = torch.cat([queries.gather(2, index).flatten(1), self.kv_proj(x)], dim=-1)
        heads = self.heads(qkv, rotary, context).view(index.shape)
        weighted = heads * routing.weights[:, None, :, None].to(heads.dtype)
        return torch.zeros_like(queries).scatter(2, index, weighted).flatten(1)


class BiasedMixture(SparseMLP):
    bias: nn.Parameter

    def forward(
        self, hidden: torch.Tensor, norm: nn.Module | None, *, add: bool = True
    ) -> torch.Tensor:
        return super().forward(hidden, norm, add=add) + self.bias


class JetMoeBlock(Block):
    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__(parts, layer)
        for norm in map(self.get_submodule, self.norms):
            norm.eps = NORM_EPS  # type: ignore[assignment]


class JetMoeDecoder(Decoder):
    block = JetMoeBlock


@dataclasses.dataclass(frozen=True)
class JetMoeWeightMap(WeightMap):
    """Reorders attention's experts: stored as experts × keys, here keys × experts."""

    head_dim: int = 1

    def pieces(
        self, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, str | None, torch.Tensor]]:
        renamed = self.renamed(name)
        if ".query_proj." in renamed and tensor.dim() == 3:
            tensor = tensor.flatten(0, 1)
        elif ".o_proj." in renamed and tensor.dim() == 3:
            experts, hidden, _ = tensor.shape
            parts = tensor.reshape(experts, hidden, -1, self.head_dim)
            tensor = parts.permute(1, 2, 0, 3).flatten(1)
        yield from super().pieces(name, tensor)


class JetMoeForCausalLM(CausalLM):
    config_fields = EXPERTS
    attention = JetMoeAttention
    decoder = JetMoeDecoder
    weight_map: WeightMap = JetMoeWeightMap(
        stacked={
            "gate_proj": Shard("gate_up_proj", "gate"), "up_proj": Shard("gate_up_proj", "up"),
        },
        tied=CausalLM.weight_map.tied,
        names={
            "self_attn.query_proj": "self_attention.experts.input_linear",
            "self_attn.o_proj": "self_attention.experts.output_linear",
            "self_attn.gate": "self_attention.experts.router.layer",
            "self_attn.bias": "self_attention.experts.bias",
            "self_attn": "self_attention",
            "experts.all_gate_up": "input_linear.weight",
            "experts.all_down": "output_linear.weight",
            "gate": "router.layer",
        },
        together={
            "all_gate_up": StackedExperts("gate_up_proj.weight", ("gate", "up"), joined=True),
            "all_down": StackedExperts("down_proj.weight"),
        },
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        weights: Any = self.weight_map
        self.weight_map = dataclasses.replace(weights, head_dim=config.head_dim)

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        experts, keys = config.hf_config.num_local_experts, config.num_kv_heads
        return {"query_proj": RowOrder.by_part(experts, keys, config.head_dim)}

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        mixture = BiasedMixture(
            hf.num_local_experts, RoutingRule(hf.num_experts_per_tok, renormalize=True),
            hf.hidden_size, hf.intermediate_size, hf.activation_function, build,
        )  # fmt: skip
        mixture.bias = nn.Parameter(build.empty(hf.hidden_size))
        return mixture
