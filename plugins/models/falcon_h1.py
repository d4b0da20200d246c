"""Falcon-H1: attention and Mamba 2 beside each other in every layer, with multipliers."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.mlp import GatedMLP
from ...core.nn.norm import RMSNorm, ScaledRMSNorm
from ...core.nn.rotary import Rotary
from ...core.nn.state.mamba2 import Mamba2Mixer
from ...core.nn.state.operations import Mamba2Factors
from ...core.protocols.attention import AttentionSpec
from ...core.protocols.field_kinds import NUMBER
from .bamba import BambaForCausalLM, mamba2_mixer
from .blocks import Block, BlockParts, SelfAttention
from .decoder import CausalLM, Decoder


class Multipliers(NamedTuple):
    """Applies the configuration's multipliers without launches of their own.

    The residual stream has a constant scale, which norms undo: with the gate's factor in the norm
    before the MLP, the MLP's output has that scale already.
    """

    stream: float
    """Scale of the residual stream."""
    norm: float
    """Scale of a layer's normed input, which queries, keys and values inherit."""
    scores: float
    """Scale of attention scores; undoes `norm` for queries and keys."""
    mlp_norm: float
    mamba: Mamba2Factors
    convolved: tuple[float, float, float]
    """Scales of Mamba's inputs, keys and queries."""

    @classmethod
    def of(cls, hf: Any) -> Multipliers:
        fields = (
            "attention_in_multiplier", "attention_out_multiplier", "key_multiplier",
            "mlp_multipliers", "ssm_in_multiplier", "ssm_multipliers", "ssm_out_multiplier",
        )  # fmt: skip
        for field in fields:
            value = getattr(hf, field)
            if not all(value if isinstance(value, list | tuple) else [value]):
                raise ConfigError(f"{field}: a factor of 0 is not supported", param=field)
        gate, down = map(float, hf.mlp_multipliers)
        stream = gate / down
        attended = float(hf.attention_out_multiplier) * stream
        norm = float(hf.attention_in_multiplier) * attended
        before = float(hf.ssm_in_multiplier) / norm
        z, x, keys, queries, steps = (before * float(factor) for factor in hf.ssm_multipliers)
        return cls(
            stream, norm, float(hf.key_multiplier) / attended**2, gate,
            Mamba2Factors(z, steps, float(hf.ssm_out_multiplier) * stream), (x, keys, queries),
        )  # fmt: skip


class FalconH1Attention(SelfAttention):
    """The scores' factor includes that of keys."""

    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        spec = super().spec(hf, layer)
        return msgspec.structs.replace(spec, scale=spec.scale * Multipliers.of(hf).scores)


class FalconH1Block(Block):
    """hidden + attention(norm(hidden)) + mamba(norm(hidden)), and an MLP; see `Multipliers`."""

    norms = ("input_layernorm", "pre_ff_layernorm")
    pre_ff_layernorm: nn.Module
    self_attn: SelfAttention
    mlp: GatedMLP

    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__(parts, layer)
        hf, build = parts.config.hf_config, parts.build
        self.multipliers = Multipliers.of(hf)
        size, eps = hf.hidden_size, stream_eps(hf)
        self.input_layernorm = ScaledRMSNorm(size, eps, build, factor=self.multipliers.norm)
        self.pre_ff_layernorm = ScaledRMSNorm(size, eps, build, factor=self.multipliers.mlp_norm)
        self.mamba: Mamba2Mixer = mamba2_mixer(
            hf, build, out_bias=bool(hf.projectors_bias), normed=hf.mamba_rms_norm,
            gate_first=not hf.mamba_norm_before_gate, factors=self.multipliers.mamba,
            input_factors=self.multipliers.convolved,
        )  # fmt: skip
        self.bias_factors = (
            (self.mamba.in_proj, self.multipliers.norm / float(hf.ssm_in_multiplier)),
            (self.mamba.out_proj, self.multipliers.mamba.out),
            (self.self_attn.qkv_proj, self.multipliers.norm / float(hf.attention_in_multiplier)),
            (self.self_attn.o_proj, float(hf.attention_out_multiplier) * self.multipliers.stream),
            (self.mlp.gate_up_proj, self.multipliers.mlp_norm),
            (self.mlp.down_proj, self.multipliers.mlp_norm),
        )

    @classmethod
    def make_norm(cls, hf: Any, build: BuildContext) -> nn.Module:
        return RMSNorm(hf.hidden_size, stream_eps(hf), build)

    def after_loading(self) -> None:
        """Scale biases as their products."""
        for layer, factor in self.bias_factors:
            if layer.bias is not None:
                layer.bias.detach().mul_(factor)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        x, norm = hidden, None
        if len(x) == 1:  # Both products apply it in their pass over the weight.
            norm = self.input_layernorm
        else:
            x = self.input_layernorm(x)
        y, remaining = self.mamba.inner(self.mamba.in_proj(x, norm=norm), context)
        heads = self.self_attn.inner(x, norm, rotary, context)
        hidden = self.mamba.out_proj(y, norm=remaining, residual=hidden)
        hidden = self.self_attn.project(heads, hidden)
        out: torch.Tensor = self.mlp(hidden, self.pre_ff_layernorm)
        return out


def stream_eps(hf: Any) -> float:
    return float(hf.rms_norm_eps) * Multipliers.of(hf).stream ** 2


class FalconH1Decoder(Decoder):
    block = FalconH1Block

    @staticmethod
    def embedding_scale(config: ModelConfig, build: BuildContext) -> float:
        hf = config.hf_config
        return float(hf.embedding_multiplier) * Multipliers.of(hf).stream


class FalconH1ForCausalLM(CausalLM):
    config_fields = {"embedding_multiplier": NUMBER}
    weight_map = BambaForCausalLM.weight_map
    attention = FalconH1Attention
    decoder = FalconH1Decoder

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.logits_factor = float(config.hf_config.lm_head_multiplier)

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        return GatedMLP(
            hf.hidden_size, hf.intermediate_size, hf.hidden_act, build, bias=bool(hf.mlp_bias)
        )
