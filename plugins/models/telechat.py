"""TeleChat 2: Llama by other names, with biases of output projections only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder, Shard, WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.mlp import GatedMLP
from .blocks import SelfAttention
from .decoder import CausalLM

KEY_VALUE = "key_value"
"""The tensor of a layer's keys and values, interleaved by head."""


class TelechatAttention(SelfAttention):
    @staticmethod
    def output_bias(hf: object) -> bool:
        return True


class TelechatWeightMap(WeightMap):
    def pieces(
        self, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, str | None, torch.Tensor]]:
        for parameter, shard, part in super().pieces(name, tensor):
            if f".{KEY_VALUE}." in name:
                yield from zip((parameter, parameter), "kv", part.chunk(2), strict=True)
            else:
                yield parameter, shard, part


class TeleChat2ForCausalLM(CausalLM):
    attention = TelechatAttention
    weight_map: WeightMap = TelechatWeightMap(
        stacked={
            "query": Shard("qkv_proj", "q"),
            KEY_VALUE: Shard("qkv_proj", "k"),
            "gate_proj": Shard("gate_up_proj", "gate"),
            "up_proj": Shard("gate_up_proj", "up"),
        },
        tied=CausalLM.weight_map.tied,
        prefixes={"transformer.": "model."},
        names={
            "embed_tokens": "word_embeddings", "layers": "h", "norm": "ln_f",
            "self_attn": "self_attention", "o_proj": "dense",
        },
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        for field in ("apply_residual_connection_post_layernorm", "embed_layernorm", "logn"):
            if getattr(config.hf_config, field, False):
                raise ConfigError(f"{field}: true is not supported", param=field)
        super().__init__(config, build)

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        return {KEY_VALUE: RowOrder.by_part(config.num_kv_heads, 2, config.head_dim)}

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        return GatedMLP(hf.hidden_size, hf.intermediate_size, hf.hidden_act, build, down_bias=True)
