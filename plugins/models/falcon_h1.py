"""Falcon-H1: attention and Mamba 2 beside each other in every layer, with multipliers."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.rotary import Rotary
from ...core.nn.state.mamba2 import Mamba2Mixer
from ...core.protocols.attention import AttentionSpec
from .bamba import BambaForCausalLM, mamba2_mixer
from .decoder import Block, CausalLM, Decoder, MakeMLP, SelfAttention


class FalconH1Attention(SelfAttention):
    """Keys have a factor, which the scores' factor contains."""

    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        spec = super().spec(hf, layer)
        return msgspec.structs.replace(spec, scale=spec.scale * float(hf.key_multiplier))


class FalconH1MLP(nn.Module):
    """factor * down(silu(factor * gate(x)) * up(x))"""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hf = config.hf_config
        self.gate_factor, self.down_factor = map(float, hf.mlp_multipliers)
        sizes = {"gate": hf.intermediate_size, "up": hf.intermediate_size}
        self.gate_up_proj = MergedLinear(hf.hidden_size, sizes, build, bias=hf.mlp_bias)
        self.down_proj = Linear(hf.intermediate_size, hf.hidden_size, build, bias=hf.mlp_bias)

    def forward(self, hidden: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        """hidden + mlp(norm(hidden)): [num_tokens, hidden_size] → the same shape"""
        gate, up = self.gate_up_proj(hidden, norm=norm).chunk(2, dim=-1)
        answer = self.down_proj(F.silu(gate * self.gate_factor) * up)
        return torch.add(hidden, answer, alpha=self.down_factor)


class FalconH1Block(Block):
    norms = ("input_layernorm", "pre_ff_layernorm")
    pre_ff_layernorm: nn.Module

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        build: BuildContext,
        attention: type[SelfAttention],
        mlp: MakeMLP,
    ) -> None:
        super().__init__(config, layer, build, attention, mlp)
        hf = config.hf_config
        self.mamba: Mamba2Mixer = mamba2_mixer(
            hf, build, out_bias=bool(hf.projectors_bias), normed=hf.mamba_rms_norm,
            gate_first=not hf.mamba_norm_before_gate,
        )  # fmt: skip
        sizes, factors = self.mamba.sizes, hf.ssm_multipliers
        widths = (sizes.inner, sizes.inner, sizes.keys, sizes.keys, sizes.num_heads)
        parts = [torch.full((n,), float(f)) for n, f in zip(widths, factors, strict=True)]
        self.factors: torch.Tensor
        self.register_buffer("factors", torch.cat(parts).to(build.device), persistent=False)
        self.attention_in, self.attention_out, self.mamba_in, self.mamba_out = map(
            float,
            (
                hf.attention_in_multiplier,
                hf.attention_out_multiplier,
                hf.ssm_in_multiplier,
                hf.ssm_out_multiplier,
            ),
        )

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        normed = self.input_layernorm(hidden)
        projected = self.mamba.in_proj(normed * self.mamba_in)
        inner, remaining = self.mamba.inner((projected * self.factors).to(normed.dtype), context)
        state = self.mamba.out_proj(inner, norm=remaining)
        attended = self.self_attn(normed * self.attention_in, None, rotary, context, add=False)
        hidden = hidden + (state * self.mamba_out + attended * self.attention_out)
        out: torch.Tensor = self.mlp(hidden, self.pre_ff_layernorm)
        return out


class FalconH1Decoder(Decoder):
    block = FalconH1Block

    @staticmethod
    def embedding_scale(config: ModelConfig, build: BuildContext) -> float:
        return float(config.hf_config.embedding_multiplier)


class FalconH1ForCausalLM(CausalLM):
    tensor_parallel = True
    weight_map = BambaForCausalLM.weight_map
    attention = FalconH1Attention
    decoder = FalconH1Decoder

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.logits_factor = float(config.hf_config.lm_head_multiplier)

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        return FalconH1MLP(config, build)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden).mul_(self.logits_factor)
