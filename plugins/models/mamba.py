"""Mamba, Falcon Mamba and Mamba 2: layers with states only."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ...core.errors import ConfigError
from ...core.loading.weight_map import WeightMap
from ...core.nn.state.mamba import MambaMixer, MambaSizes
from ...core.nn.state.mamba2 import Mamba2Mixer
from ...core.nn.state.sizes import Mamba2Sizes
from .blocks import BlockParts
from .decoder import CausalLM
from .mixer import MixerBlock, MixerDecoder

BACKBONE = WeightMap(
    names={
        "model.embed_tokens": "backbone.embeddings",
        "model.layers": "backbone.layers",
        "model.norm": "backbone.norm_f",
    },
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)
"""Names in checkpoints whose decoder is called a backbone."""


def check_activation(hf: Any) -> None:
    """Raise ConfigError unless the convolution is followed by silu."""
    if hf.hidden_act not in ("silu", "swish"):
        raise ConfigError(f"hidden_act: {hf.hidden_act!r} is not supported", param="hidden_act")


class MambaBlock(MixerBlock):
    def make_mixer(self, parts: BlockParts, layer: int) -> MambaMixer:
        hf, build = parts.config.hf_config, parts.build
        check_activation(hf)
        sizes = MambaSizes(
            hf.hidden_size, hf.intermediate_size, hf.state_size, int(hf.time_step_rank),
            hf.conv_kernel,
        )  # fmt: skip
        return MambaMixer(
            sizes, build, bias=hf.use_bias, conv_bias=hf.use_conv_bias, norms=self.norms_of(hf)
        )

    @staticmethod
    def norms_of(hf: Any) -> tuple[Any, ...]:
        return ()


class MambaDecoder(MixerDecoder):
    mixer_block = MambaBlock


class MambaForCausalLM(CausalLM):
    weight_map = BACKBONE
    decoder = MambaDecoder


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class FalconMambaBlock(MambaBlock):
    @staticmethod
    def norms_of(hf: Any) -> tuple[Any, ...]:
        return (partial(_normed, eps=float(hf.mixer_rms_eps)),) * 3


class FalconMambaDecoder(MixerDecoder):
    mixer_block = FalconMambaBlock


class FalconMambaForCausalLM(CausalLM):
    weight_map = BACKBONE
    decoder = FalconMambaDecoder


class Mamba2Block(MixerBlock):
    def make_mixer(self, parts: BlockParts, layer: int) -> Mamba2Mixer:
        hf, build = parts.config.hf_config, parts.build
        check_activation(hf)
        sizes = Mamba2Sizes(
            hf.hidden_size, hf.num_heads, hf.head_dim, hf.state_size, hf.n_groups, hf.conv_kernel
        )
        low, high = hf.time_step_limit
        return Mamba2Mixer(
            sizes, build, eps=float(hf.layer_norm_epsilon), bias=hf.use_bias,
            out_bias=hf.use_bias, conv_bias=hf.use_conv_bias, dt_limit=(float(low), float(high)),
        )  # fmt: skip


class Mamba2Decoder(MixerDecoder):
    mixer_block = Mamba2Block


class Mamba2ForCausalLM(CausalLM):
    weight_map = BACKBONE
    decoder = Mamba2Decoder
