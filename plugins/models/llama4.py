"""Llama 4 (text): rotated layers that attend to chunks, with norms of heads after the rotation;
others whose queries grow with their position; one expert per token beside a shared one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder, StackedExperts
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.experts import SparseMLP
from ...core.nn.mlp import GatedMLP
from ...core.nn.rotary import Rotary
from ...core.nn.routing import Routing, RoutingRule
from ...core.protocols.field_kinds import SIZE
from .decoder import CausalLM, Decoder
from .expert_fields import EXPERTS
from .parts import RotatedFirstAttention, WeightlessRMSNorm
from .windows import ChunkedAttention


class Llama4Attention(ChunkedAttention, RotatedFirstAttention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        hf = config.hf_config
        if hf.use_qk_norm and hf.no_rope_layers[layer]:
            self.q_norm = self.k_norm = WeightlessRMSNorm(self.head_dim, hf.rms_norm_eps, build)
        self.floor = float(hf.floor_scale) if hf.attn_temperature_tuning else None
        self.growth = float(hf.attn_scale)

    def heads(
        self, qkv: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        if rotary is None and self.floor is not None:
            steps = ((context.positions + 1) / self.floor).floor()
            queries = qkv[:, : self.num_heads * self.head_dim]
            queries.mul_((torch.log1p(steps) * self.growth + 1)[:, None].to(qkv.dtype))
        return super().heads(qkv, rotary, context)


class Llama4Decoder(Decoder):
    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        """`no_rope_layers` has a 1 for rotated layers."""
        rotary = Rotary(config, build)
        return [rotary if flag else None for flag in config.hf_config.no_rope_layers]


class ScaledInputMLP(SparseMLP):
    """The chosen expert's input is multiplied by the sigmoid of its logit."""

    def _routed(
        self,
        x: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        logits = self.gate(x) if logits is None else logits
        highest, chosen = logits.max(dim=-1, keepdim=True)
        weight = self.operations.pointwise(torch.sigmoid, highest.float())
        routing = self.experts.local(Routing(torch.ones_like(weight), chosen.to(torch.int32)))
        return self.computed(x * weight.to(x.dtype), routing, residual)


class Llama4ForCausalLM(CausalLM):
    config_fields = {**EXPERTS, "attention_chunk_size": SIZE}
    attention = Llama4Attention
    decoder = Llama4Decoder
    weight_map = dataclasses.replace(
        CausalLM.weight_map,
        names={"shared_experts": "shared_expert", "mlp": "feed_forward", "gate": "router"},
        together={
            "gate_up_proj": StackedExperts(
                "gate_up_proj.weight", ("gate", "up"), transposed=True, joined=True
            ),
            "down_proj": StackedExperts("down_proj.weight", transposed=True),
        },
    )

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        order = RowOrder.halves(config.head_dim)
        return {"q_proj": order, "k_proj": order}

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        size, inner = hf.hidden_size, hf.intermediate_size
        if layer not in hf.moe_layers:
            return GatedMLP(size, hf.intermediate_size_mlp, hf.hidden_act, build)
        if hf.num_experts_per_tok != 1:
            raise ConfigError(
                f"num_experts_per_tok: {hf.num_experts_per_tok} is not 1",
                param="num_experts_per_tok",
            )
        return ScaledInputMLP(
            hf.num_local_experts, RoutingRule(1), size, inner, hf.hidden_act, build,
            shared=GatedMLP(size, inner, hf.hidden_act, build),
        )  # fmt: skip
