"""Bamba and Granite 4: Mamba 2 in most layers, attention in some, and an MLP in each."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.experts import SparseMLP
from ...core.nn.mlp import GatedMLP
from ...core.nn.rotary import Rotary
from ...core.nn.state.mamba2 import Mamba2Mixer
from ...core.nn.state.sizes import Mamba2Sizes
from .blocks import BlockParts
from .decoder import QKV_SHARDS, CausalLM, Decoder
from .expert_fields import EXPERTS
from .granite import MULTIPLIERS, GraniteAttention
from .granite_moe import STORED_EXPERTS, STORED_TOGETHER
from .mamba import check_activation
from .mixer import HybridBlock
from .parts import renormalized_mixture


def mamba2_mixer(hf: Any, build: BuildContext, **more: Any) -> Mamba2Mixer:
    """Create the mixer of a configuration with fields `mamba_*`. more: see `Mamba2Mixer`."""
    check_activation(hf)
    low, high = hf.time_step_limit
    sizes = Mamba2Sizes(
        hf.hidden_size, hf.mamba_n_heads, int(hf.mamba_d_head), hf.mamba_d_state,
        hf.mamba_n_groups, hf.mamba_d_conv,
    )  # fmt: skip
    options = {"out_bias": hf.mamba_proj_bias, **more}
    return Mamba2Mixer(
        sizes, build, eps=float(hf.rms_norm_eps), bias=hf.mamba_proj_bias,
        conv_bias=hf.mamba_conv_bias, dt_limit=(float(low), float(high)), **options,
    )  # fmt: skip


class BambaBlock(HybridBlock):
    norms = ("input_layernorm", "pre_ff_layernorm")

    def make_mixer(self, parts: BlockParts, layer: int) -> nn.Module:
        return mamba2_mixer(parts.config.hf_config, parts.build)


class BambaDecoder(Decoder):
    block = BambaBlock


class BambaForCausalLM(CausalLM):
    decoder = BambaDecoder
    weight_map = dataclasses.replace(
        CausalLM.weight_map, names={"mlp": "feed_forward", "model.norm": "model.final_layernorm"}
    )


class GraniteHybridBlock(HybridBlock):
    """hidden + multiplier * f(hidden), for the mixer and then for the MLP, which may have experts
    beside it.
    """

    mlp_name = "shared_mlp"
    shared_mlp: GatedMLP
    block_sparse_moe: SparseMLP | None

    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__(parts, layer)
        hf = parts.config.hf_config
        self.multiplier = float(hf.residual_multiplier)
        self.block_sparse_moe = None
        if hf.num_local_experts:
            self.block_sparse_moe = renormalized_mixture(hf, parts.build)

    def make_mixer(self, parts: BlockParts, layer: int) -> nn.Module:
        return mamba2_mixer(parts.config.hf_config, parts.build)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        answer = self.mixer(hidden, self.input_layernorm, rotary, context, add=False)
        hidden = torch.add(hidden, answer, alpha=self.multiplier)
        normed = self.post_attention_layernorm(hidden)
        answer = self.shared_mlp.project(self.shared_mlp.inner(normed))
        if self.block_sparse_moe is not None:
            answer = answer + self.block_sparse_moe(normed, None, add=False)
        return torch.add(hidden, answer, alpha=self.multiplier)


class GraniteHybridDecoder(Decoder):
    block = GraniteHybridBlock

    @staticmethod
    def embedding_scale(config: ModelConfig, build: BuildContext) -> float:
        return float(config.hf_config.embedding_multiplier)

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> list[Rotary | None]:
        turns = config.hf_config.position_embedding_type == "rope"
        return [Rotary(config, build) if turns else None] * config.num_layers


class GraniteMoeHybridForCausalLM(CausalLM):
    config_fields = EXPERTS | MULTIPLIERS
    attention = GraniteAttention
    decoder = GraniteHybridDecoder
    weight_map = WeightMap(
        stacked=QKV_SHARDS,
        tied=CausalLM.weight_map.tied,
        names={
            "shared_mlp.gate_up_proj": "shared_mlp.input_linear",
            "shared_mlp.down_proj": "shared_mlp.output_linear",
            **STORED_EXPERTS,
        },
        together=STORED_TOGETHER,
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.logits_factor = 1 / float(config.hf_config.logits_scaling)

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        return GatedMLP(
            hf.hidden_size, hf.shared_intermediate_size, hf.hidden_act, build, whole=True
        )
