"""ZAYA1: queries and keys convolved over the last tokens, half of the values from the previous
token (arXiv 2510.04476), and mixtures whose routers pass states from layer to layer.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard, StackedExperts
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.experts import Router, SparseMLP, check_features
from ...core.nn.linear import MergedLinear
from ...core.nn.norm import RMSNorm
from ...core.nn.rotary import Rotary
from ...core.nn.routing import RoutingRule
from ...core.nn.state.layer import CausalConv, StateLayer
from .blocks import Block, BlockParts, SelfAttention
from .decoder import CausalLM, Decoder, rotaries_by_type
from .expert_fields import EXPERTS

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values: [num_tokens, heads, head_dim]"""


class GroupedConv(nn.Module):
    """weight: [heads * head_dim, head_dim, taps], bias: [heads * head_dim]."""

    def __init__(self, heads: int, size: int, taps: int, build: BuildContext) -> None:
        super().__init__()
        self.weight = nn.Parameter(build.empty(heads * size, size, taps))
        self.bias = nn.Parameter(build.empty(heads * size))
        self.heads, self.size = heads, size
        self.product: torch.Tensor
        """[heads, taps * head_dim, head_dim], the newest token first"""

    def after_loading(self) -> None:
        weight = self.weight.data.view(self.heads, self.size, self.size, -1).flip(-1)
        self.product = weight.permute(0, 3, 2, 1).flatten(1, 2).contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, taps, heads, head_dim] → [num_tokens, heads, head_dim]"""
        inputs = x.permute(2, 0, 1, 3).flatten(2)
        bias = self.bias.view(self.heads, 1, self.size)
        return torch.baddbmm(bias, inputs, self.product).transpose(0, 1)


class ConvolvedProjection(StateLayer):
    """Makes heads of hidden states: queries and keys through two convolutions, the first one per
    channel, plus means of both; values half from the token, half from the previous one.

    The first convolution recomputes, shifted, the earlier outputs that the second one reads.
    """

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf: Any = config.hf_config
        size, self.num_heads, self.keys = config.head_dim, config.num_heads, config.num_kv_heads
        self.width, half = (self.num_heads + self.keys) * size, self.keys * size // 2
        self.first, self.second = hf.cca_time0, hf.cca_time1
        taps = self.first + self.second - 1
        channels = self.second * self.width + half
        super().__init__(conv=((taps - 1, channels), build.dtype))
        self.operations, self.size = build.operations, size
        self.proj = MergedLinear(
            hf.hidden_size,
            {"q": self.num_heads * size, "k": self.keys * size, "v": half, "d": half}, build,
        )  # fmt: skip
        self.conv_qk_depthwise = CausalConv(self.width, self.first, build, bias=True)
        self.conv_qk_grouped = GroupedConv(self.num_heads + self.keys, size, self.second, build)
        self.kernel, self.bias = torch.zeros(channels, taps), torch.zeros(channels)

    def after_loading(self) -> None:
        """Join the convolution's kernel, once per shift, and the delay."""
        conv, taps = self.conv_qk_depthwise, self.kernel.shape[1]
        kernel, bias = self.kernel.to(conv.weight), self.bias.to(conv.weight)
        for lag in range(self.second):
            own = slice(lag * self.width, (lag + 1) * self.width)
            kernel[own, taps - lag - self.first : taps - lag] = conv.kernel.data
            bias[own] = cast(torch.Tensor, conv.bias).data
        kernel[self.second * self.width :, taps - 2] = 1.0
        self.kernel, self.bias = kernel, bias

    def forward(self, x: torch.Tensor, context: ForwardContext) -> Heads:
        projected, half = self.proj(x), self.keys * self.size // 2
        both, now, late = projected.split([self.width, half, half], dim=-1)
        convolved = self.operations.causal_conv(
            torch.cat([both] * self.second + [late], dim=-1), self.kernel, self.bias,
            self.state("conv"), context.layout.state_rows, silu=False,
        )  # fmt: skip
        last, late = convolved.tensor_split((-half,), dim=-1)
        mixed = self.conv_qk_grouped(last.view(len(x), self.second, -1, self.size))
        heads = both.view(len(x), -1, self.size)
        query, key = heads[:, : self.num_heads], heads[:, self.num_heads :]
        mean = (query.view(len(x), self.keys, -1, self.size) + key[:, :, None]) * 0.5
        return (
            mixed[:, : self.num_heads] + mean.flatten(1, 2),
            mixed[:, self.num_heads :] + mean.mean(2),
            torch.cat([now, late], dim=-1).view(len(x), -1, self.size),
        )


class ZayaAttention(SelfAttention):
    """Queries and keys have length sqrt(head_dim); keys have a factor per head."""

    qkv_proj: Any

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        self.qkv_proj = ConvolvedProjection(config, build)
        self.temp = nn.Parameter(build.empty(config.num_kv_heads))

    @staticmethod
    def sliding_window(hf: Any, layer: int) -> int | None:
        return int(hf.sliding_window) if hf.layer_types[layer] == "hybrid_sliding" else None

    def inner(
        self,
        hidden: torch.Tensor,
        norm: nn.Module | None,
        rotary: Rotary | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        query, key, value = self.qkv_proj(hidden if norm is None else norm(hidden), context)
        key = self.scaled(key) * self.temp[:, None]
        parts = [part.flatten(1) for part in (self.scaled(query), key, value)]
        return self.heads(torch.cat(parts, dim=-1), rotary, context)

    def scaled(self, heads: torch.Tensor) -> torch.Tensor:
        wide, least = heads.float(), torch.finfo(heads.dtype).eps
        length = wide.norm(dim=-1, keepdim=True).clamp_min(least)
        out: torch.Tensor = (wide * (self.head_dim**0.5 / length)).to(heads.dtype)
        return out


STATES = "router states"
"""In `ForwardContext.shared`: the previous layer's."""


class RouterMLP(nn.Module):
    def __init__(self, size: int, num_experts: int, eps: float, build: BuildContext) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps, build)
        self.fc1 = Router(size, size, build, bias=True)
        self.fc2 = Router(size, size, build, bias=True)
        self.out_proj = Router(num_experts, size, build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.fc2(F.gelu(self.fc1(self.norm(x)))))
        logits: torch.Tensor = self.out_proj(inner)
        return logits


class ZayaRouter(nn.Module):
    """Adds the previous layer's state to its own, and makes logits of the sum."""

    def __init__(self, hf: Any, layer: int, build: BuildContext) -> None:
        super().__init__()
        size, choices = hf.router_hidden_size, hf.num_experts + 1
        self.down_proj = Router(size, hf.hidden_size, build, bias=True)
        self.router_mlp = RouterMLP(size, choices, float(hf.rms_norm_eps), build)
        self.router_states_scale = nn.Parameter(build.empty(size)) if layer else None
        float32 = dataclasses.replace(build, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(float32.empty(choices))

    def forward(
        self, x: torch.Tensor, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_tokens, hidden_size] → logits, and the next layer's `states`, [num_tokens, size]"""
        own: torch.Tensor = self.down_proj(x)
        if states is not None and self.router_states_scale is not None:
            own = own + states * self.router_states_scale
        return self.router_mlp(own), own


class ZayaMixture(SparseMLP):
    """One expert per token; the last one adds nothing, so kernels treat it as another rank's."""

    gate: Any

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        hf: Any = config.hf_config
        check_features(build.operations, frozenset({"experts.foreign"}))
        super().__init__(
            hf.num_experts, RoutingRule(1), hf.hidden_size, hf.moe_intermediate_size,
            hf.hidden_act, build, score_bias=True,
        )  # fmt: skip
        self.num_choices = hf.num_experts + 1
        self.gate = ZayaRouter(hf, layer, build)
        for field, part in (
            ("all2all_backend", self.experts.exchange), ("enable_eplb", self.experts.balance)
        ):  # fmt: skip
            if part is not None:
                raise ConfigError(
                    f"{field}: is not supported for models with an expert that adds nothing",
                    param=field,
                )

    def routed(self, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
        """[num_tokens, hidden_size] → the same shape"""
        logits, shared[STATES] = self.gate(x, shared.get(STATES))
        routing = self.experts.local(self.route(logits)._replace(num_experts=logits.shape[1]))
        return self.operations.experts(
            x,
            routing,
            self.experts.gate_up_proj.expert_weight,
            self.experts.down_proj.expert_weight,
            residual=torch.zeros_like(x),
        )


class ResidualScaling(nn.Module):
    """(x + bias) * scale of an output, and of the float32 residual stream."""

    def __init__(self, size: int, build: BuildContext) -> None:
        super().__init__()
        for name in ("hidden_states", "residual"):
            setattr(self, f"{name}_scale", nn.Parameter(build.empty(size)))
            setattr(self, f"{name}_bias", nn.Parameter(build.empty(size)))

    def forward(self, output: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        parts: Any = self
        output = (output + parts.hidden_states_bias) * parts.hidden_states_scale
        stream: torch.Tensor = (hidden + parts.residual_bias) * parts.residual_scale
        return output + stream


class ZayaBlock(Block):
    mlp: ZayaMixture

    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__(parts, layer)
        config, build = parts.config, parts.build
        self.post_attention_residual_scale = ResidualScaling(config.hidden_size, build)
        self.post_mlp_residual_scale = ResidualScaling(config.hidden_size, build)
        self.dtype = build.dtype

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] float32 → the same shape"""
        attn_output = self.self_attn(
            hidden.to(self.dtype), self.input_layernorm, rotary, context, add=False
        )
        hidden = self.post_attention_residual_scale(attn_output, hidden)
        normed = self.post_attention_layernorm(hidden.to(self.dtype))
        mlp_output = self.mlp.routed(normed, context.shared)
        out: torch.Tensor = self.post_mlp_residual_scale(mlp_output, hidden)
        return out


class ZayaDecoder(Decoder):
    block = ZayaBlock
    rotaries_of = staticmethod(rotaries_by_type)

    def __init__(self, parts: BlockParts) -> None:
        super().__init__(parts)
        config, build = parts.config, parts.build
        self.input_hidden_states_scale = nn.Parameter(build.empty(config.hidden_size))
        self.input_hidden_states_bias = nn.Parameter(build.empty(config.hidden_size))

    def forward(self, input_ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        own = self.embed(input_ids, context.positions)
        hidden = (own + self.input_hidden_states_bias) * self.input_hidden_states_scale
        hidden = hidden.float()
        layers: Any = self.unlike_layers() if context.precompiling else self.stage_layers()
        for layer, rotary in layers:
            hidden = layer(hidden, rotary, context)
        return hidden.to(own.dtype)


class ZayaForCausalLM(CausalLM):
    batch_invariant = False
    tensor_parallel = False
    config_fields = EXPERTS
    attention = ZayaAttention
    decoder = ZayaDecoder
    weight_map = dataclasses.replace(
        CausalLM.weight_map,
        stacked={
            "q_proj": Shard("proj", "q"), "k_proj": Shard("proj", "k"),
            "v_proj_current": Shard("proj", "v"), "v_proj_delayed": Shard("proj", "d"),
            "gate_proj": Shard("gate_up_proj", "gate"), "up_proj": Shard("gate_up_proj", "up"),
        },
        names={"temp": "qk_norm.temp", "e_score_correction_bias": "balancing_biases"},
        together={
            "gate_up_proj": StackedExperts("gate_up_proj.weight", ("gate", "up"), joined=True),
            "down_proj": StackedExperts("down_proj.weight"),
        },
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf: Any = config.hf_config
        if hf.attention_bias:
            raise ConfigError("attention_bias: only false is supported", param="attention_bias")
        for field, least in (("cca_time0", 2), ("cca_time1", 1), ("router_hidden_size", 1)):
            if getattr(hf, field) < least:
                value = getattr(hf, field)
                raise ConfigError(f"{field}: {value} is less than {least}", param=field)
        super().__init__(config, build)

    @staticmethod
    def head_bias(hf: Any) -> bool:
        return bool(hf.lm_head_bias)

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        return ZayaMixture(config, layer, build)
