"""Nemotron-H and Nemotron 3: layers of one part each: Mamba 2, unrotated attention, an MLP, or a
mixture without gates.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.experts import SparseMLP
from ...core.nn.mlp import PlainMLP
from ...core.nn.rotary import Rotary
from ...core.nn.routing import RoutingRule
from ...core.nn.state.mamba2 import Mamba2Mixer
from ...core.nn.state.sizes import Mamba2Sizes
from .blocks import BlockParts
from .decoder import QKV_SHARDS, CausalLM, Decoder
from .expert_fields import DEEPSEEK_EXPERTS
from .mamba import BACKBONE
from .mixer import MixerBlock, MixerDecoder


class NemotronHBlock(MixerBlock):
    def make_mixer(self, parts: BlockParts, layer: int) -> nn.Module:
        parts = parts._replace(config=self.own_config(parts.config, layer))
        hf, build = parts.config.hf_config, parts.build
        kind = hf.layers_block_type[layer]
        if kind == "full_attention":
            return parts.make_attention(layer)
        if kind == "mlp":
            return _plain(hf, hf.intermediate_size, build)
        if kind == "moe":
            return _mixture(hf, build)
        if kind != "linear_attention":
            raise ConfigError(
                f"layers_block_type: a layer of kind {kind!r} is not supported",
                param="layers_block_type",
            )
        if hf.mamba_hidden_act != "silu":
            raise ConfigError(
                f"mamba_hidden_act: {hf.mamba_hidden_act!r} is not supported",
                param="mamba_hidden_act",
            )
        sizes = Mamba2Sizes(
            hf.hidden_size, hf.mamba_num_heads, hf.mamba_head_dim, hf.ssm_state_size, hf.n_groups,
            hf.conv_kernel,
        )  # fmt: skip
        return Mamba2Mixer(
            sizes, build, eps=float(hf.layer_norm_epsilon), bias=hf.use_bias, out_bias=hf.use_bias,
            conv_bias=hf.use_conv_bias, dt_limit=self.step_limits(hf),
        )  # fmt: skip

    @staticmethod
    def step_limits(hf: Any) -> tuple[float, float]:
        """Return the step size's limits; as in `transformers`, `time_step_limit` is ignored."""
        return float(hf.time_step_min), float("inf")

    @staticmethod
    def own_config(config: ModelConfig, layer: int) -> ModelConfig:
        return config

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        if isinstance(self.mixer, PlainMLP | SparseMLP):
            out: torch.Tensor = self.mixer(hidden, self.norm)
            return out
        return super().forward(hidden, rotary, context)


def _plain(hf: Any, inner: int, build: BuildContext) -> PlainMLP:
    return PlainMLP(
        hf.hidden_size, inner, hf.mlp_hidden_act, build, bias=hf.mlp_bias, field="mlp_hidden_act"
    )


def _mixture(hf: Any, build: BuildContext) -> SparseMLP:
    """Create experts, chosen as DeepSeek-V3's are, and a shared one. With `moe_latent_size` the
    chosen ones read a projection of that width.
    """
    for field, served in (("mlp_hidden_act", "relu2"), ("mlp_bias", False)):
        if (value := getattr(hf, field)) != served:
            raise ConfigError(
                f"{field}: {value!r} is not supported for layers of experts", param=field
            )
    rule = RoutingRule(
        hf.num_experts_per_tok, scoring="sigmoid", renormalize=bool(hf.norm_topk_prob),
        groups=hf.n_group or 1, top_groups=hf.topk_group or 1,
        factor=float(hf.routed_scaling_factor),
    )  # fmt: skip
    return SparseMLP(
        hf.n_routed_experts, rule, hf.hidden_size, hf.moe_intermediate_size, hf.mlp_hidden_act,
        build, score_bias=True, wide_router=True, gated=False, latent_size=hf.moe_latent_size,
        shared=_plain(hf, hf.moe_shared_expert_intermediate_size, build),
    )  # fmt: skip


class NemotronHDecoder(MixerDecoder):
    mixer_block = NemotronHBlock


class NemotronHForCausalLM(CausalLM):
    config_fields = DEEPSEEK_EXPERTS
    decoder: ClassVar[type[Decoder]] = NemotronHDecoder
    weight_map = dataclasses.replace(BACKBONE, stacked=QKV_SHARDS, ignored=("mtp.",))
