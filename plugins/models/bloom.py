"""BLOOM: slopes for positions, a norm of the embeddings, layer norms, an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder
from ...core.nn.context import BuildContext
from ...core.nn.mlp import PlainMLP
from ...core.parallel.missing_layer import MissingLayer
from ...core.protocols.attention import AttentionSpec
from ...core.protocols.field_kinds import INTEGER
from .blocks import BlockParts, SelfAttention
from .decoder import CausalLM
from .falcon import FalconForCausalLM
from .gpt2 import Gpt2Attention
from .parts import LayerNormBlock, UnrotatedDecoder, alibi_slopes, grouped_rows


class BloomAttention(Gpt2Attention):
    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        spec = SelfAttention.spec(self, hf, layer)
        slopes = alibi_slopes(self.all_heads)[self.own.queries]
        return msgspec.structs.replace(spec, alibi_slopes=slopes)


class BloomDecoder(UnrotatedDecoder):
    block = LayerNormBlock

    def __init__(self, parts: BlockParts) -> None:
        super().__init__(parts)
        build = parts.build
        self.word_embeddings_layernorm: nn.Module = MissingLayer()
        if build.ranks.pipeline.first:
            self.word_embeddings_layernorm = self.block.make_norm(parts.config.hf_config, build)

    def embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.word_embeddings_layernorm(super().embed(input_ids, positions))
        return normed


class BloomForCausalLM(CausalLM):
    """Checkpoints may lack the prefix `transformer.`"""

    ignored_fields = frozenset({"head_dim"})
    config_fields = {"n_head": INTEGER, "n_layer": INTEGER, "seq_length": INTEGER}
    attention = BloomAttention
    decoder = BloomDecoder
    weight_map = replace(
        FalconForCausalLM.weight_map,
        prefixes={"transformer.": "model."} | {part: f"model.{part}" for part in
                  ("word_embeddings", "h.", "ln_f.")},
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        field = "apply_residual_connection_post_layernorm"
        if getattr(config.hf_config, field):
            raise ConfigError(f"{field}: true is not supported", param=field)
        super().__init__(config, build)

    @classmethod
    def context_length(cls, hf_config: Any) -> int | None:
        length: int | None = getattr(hf_config, "seq_length", None)
        return length

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        return {"qkv_proj": grouped_rows(config, config.num_heads)}

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        size = config.hidden_size
        return PlainMLP(size, 4 * size, "gelu_pytorch_tanh", build)
