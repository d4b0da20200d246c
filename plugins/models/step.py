"""Step 3.5: heads and rotations by layer type, a gate per head, DeepSeek's mixtures beside a shared
expert, and clamped gates in some layers.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import StackedExperts, WeightMap
from ...core.nn.activations import LimitedSwiGLU
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.experts import SparseMLP
from ...core.nn.linear import Linear
from ...core.nn.mlp import GatedMLP
from ...core.nn.norm import OffsetRMSNorm
from ...core.nn.rotary import Rotary
from ...core.nn.routing import RoutingRule
from .decoder import CausalLM, Decoder
from .deepseek_moe import further_layers
from .gemma import GemmaBlock
from .windows import WindowedAttention


class StepAttention(WindowedAttention):
    """Norms on each head's queries and keys; each head's output times the sigmoid of a number."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        hf = copy.copy(config.hf_config)
        other = getattr(hf, "attention_other_setting", None)
        if other and hf.layer_types[layer] == other["attention_type"]:
            hf.num_attention_heads = other["num_attention_heads"]
            hf.num_key_value_heads = other["num_attention_groups"]
            hf.head_dim = other["head_dim"]
        super().__init__(dataclasses.replace(config, hf_config=hf), layer, build)
        self.q_norm = OffsetRMSNorm(self.head_dim, hf.rms_norm_eps, build)
        self.k_norm = OffsetRMSNorm(self.head_dim, hf.rms_norm_eps, build)
        self.operations = build.operations
        self.g_proj: nn.Module | None = None
        if hf.use_head_wise_attn_gate:
            self.g_proj = Linear(
                hf.hidden_size, self.all_heads, build, shard="out", share=self.own.queries
            )

    def inner(
        self,
        hidden: torch.Tensor,
        norm: nn.Module | None,
        rotary: Rotary | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        heads = super().inner(hidden, norm, rotary, context)
        if self.g_proj is None:
            return heads
        logits = self.g_proj(hidden, norm=norm).float()
        gate = self.operations.pointwise(torch.sigmoid, logits).to(heads.dtype)
        return (heads.view(*gate.shape, -1) * gate[:, :, None]).flatten(-2)


class StepDecoder(Decoder):
    block = GemmaBlock

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        """Bases and rotated parts are per layer; some types are scaled."""
        hf = config.hf_config
        rotaries: dict[tuple[Any, ...], Rotary | None] = {}
        keys = []
        for layer in range(config.num_layers):
            turns = not hf.use_rope_layers or bool(hf.use_rope_layers[layer])
            scaled = not hf.yarn_only_types or hf.layer_types[layer] in hf.yarn_only_types
            part = hf.partial_rotary_factors[layer] if hf.partial_rotary_factors else 1.0
            keys.append((turns, scaled, part, hf.layer_rope_theta[layer]))
        for key in set(keys):
            turns, scaled, part, base = key
            rope = {"rope_type": "default", **(hf.layer_rope_scaling or {} if scaled else {})}
            rope |= {"rope_theta": base, "partial_rotary_factor": part}
            rotaries[key] = Rotary(config, build, rope) if turns else None
        return [rotaries[key] for key in keys]


class StepWeightMap(WeightMap):
    """Routers and experts are stored below `moe`."""

    def renamed(self, name: str) -> str:
        name = re.sub(r"\.moe\.(gate|up|down)_proj\.(\w+)$", r".mlp.experts.\1_\2", name)
        return super().renamed(name.replace(".moe.", ".mlp."))

    def source(self, parameter: str, shard: str | None = None) -> str:
        name = super().source(parameter, shard)
        name = re.sub(r"\.mlp\.experts\.(gate|up|down)_(\w+)$", r".moe.\1_proj.\2", name)
        return re.sub(r"\.mlp\.(experts|gate|router_bias)\b", r".moe.\1", name)


class Step3p5ForCausalLM(CausalLM):
    attention = StepAttention
    decoder = StepDecoder
    weight_map: WeightMap = StepWeightMap(
        stacked=CausalLM.weight_map.stacked,
        tied=CausalLM.weight_map.tied,
        names={
            "mlp.shared_experts": "share_expert",
            "gate.e_score_correction_bias": "router_bias",
        },
        together={
            f"{part}_{leaf}": StackedExperts(f"{layer}.{leaf}", (shard,))
            for part, layer, shard in (
                ("gate", "gate_up_proj", "gate"), ("up", "gate_up_proj", "up"),
                ("down", "down_proj", ""),
            )
            for leaf in ("weight", "weight_scale", "weight_scale_inv")
        },
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf = config.hf_config
        if hf.att_impl_type != "GQA":
            raise ConfigError(
                f"att_impl_type: {hf.att_impl_type!r} is not supported", param="att_impl_type"
            )
        super().__init__(config, build)
        self.weight_map = dataclasses.replace(self.weight_map, ignored=further_layers(config))

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        shared_limit = limit_of(hf.swiglu_limits_shared, layer)
        if layer not in hf.moe_layers:
            return GatedMLP(
                hf.hidden_size, hf.intermediate_size, "silu", build, clamped=shared_limit
            )
        scoring: Any = hf.moe_router_activation
        if scoring not in ("softmax", "sigmoid"):
            raise ConfigError(
                f"moe_router_activation: {scoring!r} is not supported",
                param="moe_router_activation",
            )
        rule = RoutingRule(
            hf.moe_top_k,
            scoring=scoring,
            renormalize=bool(hf.norm_expert_weight),
            factor=float(hf.moe_router_scaling_factor),
        )
        return SparseMLP(
            hf.moe_num_experts,
            rule,
            hf.hidden_size,
            hf.moe_intermediate_size,
            "silu",
            build,
            score_bias=bool(hf.use_moe_router_bias),
            wide_router=True,
            clamped=limit_of(hf.swiglu_limits, layer),
            shared=GatedMLP(
                hf.hidden_size, hf.share_expert_dim, "silu", build, clamped=shared_limit
            ),
        )


def limit_of(limits: Sequence[float | None] | None, layer: int) -> LimitedSwiGLU | None:
    """Return a layer's limit; None for 0 or a missing one."""
    limit = limits[layer] if limits and layer < len(limits) else None
    return LimitedSwiGLU(float(limit)) if limit else None
