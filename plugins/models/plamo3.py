"""PLaMo 3: norms before and after attention and MLP, all with offsets, and windows in most
layers.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.mlp import GatedMLP
from ...core.nn.norm import OffsetRMSNorm
from .blocks import BlockParts, NormedBlock
from .decoder import CausalLM, Decoder, rotaries_by_type
from .parts import FusedAttention
from .plamo2 import OFFSETS
from .windows import WindowedAttention


class Plamo3Attention(WindowedAttention, FusedAttention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        eps = float(config.hf_config.rms_norm_eps)
        self.q_norm = OffsetRMSNorm(self.head_dim, eps, build)
        self.k_norm = OffsetRMSNorm(self.head_dim, eps, build)


class Plamo3Block(NormedBlock):
    norms = tuple(OFFSETS)
    norm = OffsetRMSNorm

    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__(parts, layer)
        for name, offset in OFFSETS.items():
            norm = getattr(self, name)
            norm.offset = offset


class Plamo3Decoder(Decoder):
    block = Plamo3Block
    rotaries_of = staticmethod(rotaries_by_type)


class Plamo3ForCausalLM(CausalLM):
    attention = Plamo3Attention
    decoder = Plamo3Decoder
    weight_map = WeightMap(
        tied=CausalLM.weight_map.tied,
        prefixes={"model.layers.layers.": "model.layers."},
        names={"self_attn": "mixer"},
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        if getattr(config.hf_config, "scale_embedding", False):
            raise ConfigError("scale_embedding: true is not supported", param="scale_embedding")
        super().__init__(config, build)

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        return GatedMLP(hf.hidden_size, hf.intermediate_size, "silu", build, whole=True)
