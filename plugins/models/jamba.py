"""Jamba: Mamba in most layers, attention without rotation in some; MLPs alternate with experts."""

from __future__ import annotations

import dataclasses

from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.norm import RMSNorm
from ...core.nn.rotary import Rotary
from ...core.nn.routing import RoutingRule
from ...core.nn.state.mamba import MambaMixer, MambaSizes
from .blocks import BlockParts
from .decoder import CausalLM, Decoder
from .expert_fields import EXPERTS
from .mamba import check_activation
from .mixer import HybridBlock

NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


class JambaBlock(HybridBlock):
    norms = ("input_layernorm", "pre_ff_layernorm")

    def make_mixer(self, parts: BlockParts, layer: int) -> nn.Module:
        hf, build = parts.config.hf_config, parts.build
        check_activation(hf)
        inner, rank = hf.mamba_expand * hf.hidden_size, int(hf.mamba_dt_rank)
        sizes = MambaSizes(hf.hidden_size, inner, hf.mamba_d_state, rank, hf.mamba_d_conv)
        widths = (rank, hf.mamba_d_state, hf.mamba_d_state)
        norms = tuple(RMSNorm(width, hf.rms_norm_eps, build) for width in widths)
        return MambaMixer(
            sizes, build, bias=hf.mamba_proj_bias, conv_bias=hf.mamba_conv_bias, norms=norms,
            norm_names=NORMS,
        )  # fmt: skip


class JambaDecoder(Decoder):
    block = JambaBlock

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> list[Rotary | None]:
        return [None] * config.num_layers


class JambaForCausalLM(CausalLM):
    config_fields = EXPERTS
    decoder = JambaDecoder
    weight_map = dataclasses.replace(
        CausalLM.weight_map,
        names={"mlp": "feed_forward", "gate": "router", "model.norm": "model.final_layernorm"},
    )

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        num_experts = hf.layers_num_experts[layer]
        if num_experts == 1:
            return CausalLM.mlp(config, layer, build)
        return SparseMLP(
            num_experts,
            RoutingRule(hf.num_experts_per_tok),
            hf.hidden_size,
            hf.intermediate_size,
            hf.hidden_act,
            build,
        )
