"""XGLM: OPT with sinusoidal positions."""

from __future__ import annotations

import math

import torch

from ...core.loading.weight_map import WeightMap
from ...core.nn.operations import PositionRows
from .blocks import BlockParts
from .decoder import QKV_SHARDS
from .opt import NAMES, OFFSET, OptBlock, OPTForCausalLM, scale_of
from .parts import UnrotatedDecoder


class XglmDecoder(UnrotatedDecoder):
    block = OptBlock
    embedding_scale = staticmethod(scale_of)

    def __init__(self, parts: BlockParts) -> None:
        super().__init__(parts)
        config, build = parts.config, parts.build
        half = config.hidden_size // 2
        steps = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
        places = torch.arange(config.max_model_len) + OFFSET
        angles = torch.outer(places.float(), steps)
        table = torch.cat([angles.sin(), angles.cos()], dim=1).to(build.device, build.dtype)
        self.places: torch.Tensor
        self.register_buffer("places", table, persistent=False)

    def position_rows(self, positions: torch.Tensor) -> PositionRows:
        return PositionRows(positions, self.places)


class XGLMForCausalLM(OPTForCausalLM):
    decoder = XglmDecoder
    weight_map = WeightMap(
        stacked=QKV_SHARDS,
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        prefixes={"model.layer_norm.": "model.norm."},
        names=NAMES,
    )
