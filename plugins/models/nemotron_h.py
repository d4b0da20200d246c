"""Nemotron-H: layers of one part each: Mamba 2, attention without rotation, or an MLP."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.mlp import PlainMLP
from ...core.nn.rotary import Rotary
from ...core.nn.state.mamba2 import Mamba2Mixer, Mamba2Sizes
from .decoder import QKV_SHARDS, CausalLM, SelfAttention
from .mamba import BACKBONE
from .mixer import MixerBlock, MixerDecoder


class NemotronHBlock(MixerBlock):
    def make_mixer(
        self, config: ModelConfig, layer: int, build: BuildContext, attention: type[SelfAttention]
    ) -> nn.Module:
        hf = config.hf_config
        kind = hf.layers_block_type[layer]
        if kind == "full_attention":
            return attention(config, layer, build)
        if kind == "mlp":
            return PlainMLP(
                hf.hidden_size, hf.intermediate_size, hf.mlp_hidden_act, build, bias=hf.mlp_bias,
                field="mlp_hidden_act",
            )  # fmt: skip
        if kind != "linear_attention" or hf.mamba_hidden_act != "silu":
            raise ConfigError(
                f"layers_block_type: a layer of kind {kind!r} is not served: experts without gates "
                "are not there yet",
                param="layers_block_type",
            )
        sizes = Mamba2Sizes(
            hf.hidden_size, hf.mamba_num_heads, hf.mamba_head_dim, hf.ssm_state_size, hf.n_groups,
            hf.conv_kernel,
        )  # fmt: skip
        low, high = hf.time_step_limit
        return Mamba2Mixer(
            sizes, build, eps=float(hf.layer_norm_epsilon), bias=hf.use_bias, out_bias=hf.use_bias,
            conv_bias=hf.use_conv_bias, dt_limit=(float(low), float(high)),
        )  # fmt: skip

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        if isinstance(self.mixer, PlainMLP):
            out: torch.Tensor = self.mixer(hidden, self.norm)
            return out
        return super().forward(hidden, rotary, context)


class NemotronHDecoder(MixerDecoder):
    mixer_block = NemotronHBlock


class NemotronHForCausalLM(CausalLM):
    tensor_parallel = True
    decoder = NemotronHDecoder
    weight_map = dataclasses.replace(BACKBONE, stacked=QKV_SHARDS)
