"""Step 1: Llama without rotation; scores fall with the square root of a key's distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.parallel.sharding import HeadShare
from ...core.protocols.attention import AttentionSpec
from .blocks import SelfAttention
from .decoder import CausalLM, Decoder
from .parts import alibi_slopes


class RootBias(nn.Module):
    """-slope * sqrt(distance), the bias of scores for each of this rank's heads.

    table: [num_heads, max_model_len] float32, by distance from the query back to the key.
    """

    table: torch.Tensor

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        own = HeadShare.of(config.num_heads, config.num_kv_heads, build.ranks.tensor).queries
        slopes = torch.tensor(alibi_slopes(config.num_heads)[own])
        roots = torch.arange(config.max_model_len).float().sqrt()
        table = -torch.outer(slopes, roots).to(build.device)
        self.register_buffer("table", table, persistent=False)


class Step1Attention(SelfAttention):
    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        return msgspec.structs.replace(super().spec(hf, layer), distance_bias=True)

    def heads(self, qkv: torch.Tensor, rotary: Any, context: ForwardContext) -> torch.Tensor:
        """`rotary`: the `RootBias`, passed in a rotation's place."""
        out: torch.Tensor = self.attention(qkv, context, distance_bias=rotary.table)
        return out


class Step1Decoder(Decoder):
    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Any]:
        """One bias for all layers, as its table is large."""
        return [RootBias(config, build)] * config.num_layers


class Step1ForCausalLM(CausalLM):
    attention = Step1Attention
    decoder = Step1Decoder
