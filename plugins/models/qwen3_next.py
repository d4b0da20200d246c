"""Qwen3-Next and Qwen3.5 (text): gated delta nets in most layers, gated attention in some."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder, Shard
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.linear import MergedLinear
from ...core.nn.norm import OffsetRMSNorm, RMSNorm
from ...core.nn.rotary import Rotary
from ...core.nn.state.delta_net import GatedDeltaNet
from ...core.nn.state.sizes import DeltaSizes
from ...core.protocols.field_kinds import SIZE, FieldKind
from .blocks import BlockParts, SelfAttention
from .decoder import CausalLM, Decoder
from .expert_fields import EXPERTS, SPARSE_LAYERS
from .mixer import HybridBlock
from .qwen2_moe import Qwen2MoeForCausalLM, shared_mixture


class GatedAttention(SelfAttention):
    """A norm on each head's queries and keys; outputs times the sigmoid of a gate, from the query
    projection.
    """

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        hf = config.hf_config
        self.operations, self.width = build.operations, self.num_heads * self.head_dim
        width = self.all_heads * self.head_dim
        keys = self.kv_heads(config) * self.head_dim
        own = self.own.rows(self.head_dim)
        gates = slice(width + own["q"].start, width + own["q"].stop)
        self.qkv_proj = MergedLinear(
            hf.hidden_size, {"q": 2 * width, "k": keys, "v": keys}, build, bias=self.qkv_bias(hf),
            shard="out", shares={**own, "q": (own["q"], gates)},
        )  # fmt: skip
        self.q_norm = OffsetRMSNorm(self.head_dim, hf.rms_norm_eps, build)
        self.k_norm = OffsetRMSNorm(self.head_dim, hf.rms_norm_eps, build)

    def heads(
        self, qkv: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        queries, gate, rest = qkv.tensor_split((self.width, 2 * self.width), dim=-1)
        heads = super().heads(torch.cat([queries, rest], dim=-1), rotary, context)
        return self.operations.sigmoid_gate(heads, gate)


DELTA_NETS: dict[str, FieldKind] = dict.fromkeys(
    (
        "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads",
        "linear_num_value_heads", "linear_value_head_dim",
    ),
    SIZE,
)  # fmt: skip
"""Fields of gated delta nets."""


def delta_sizes(hf: Any) -> DeltaSizes:
    return DeltaSizes(
        hf.hidden_size, hf.linear_num_key_heads, hf.linear_num_value_heads, hf.linear_key_head_dim,
        hf.linear_value_head_dim, hf.linear_conv_kernel_dim,
    )  # fmt: skip


class Qwen3NextBlock(HybridBlock):
    norm: ClassVar[type[RMSNorm]] = OffsetRMSNorm
    state_name = "linear_attn"

    def make_mixer(self, parts: BlockParts, layer: int) -> nn.Module:
        hf: Any = parts.config.hf_config
        if hf.hidden_act not in ("silu", "swish"):
            raise ConfigError(f"hidden_act: {hf.hidden_act!r} is not supported", param="hidden_act")
        sizes = delta_sizes(hf)
        if sizes.num_value_heads % sizes.num_key_heads:
            raise ConfigError(
                f"linear_num_value_heads: {sizes.num_value_heads} is no multiple of "
                f"linear_num_key_heads {sizes.num_key_heads}",
                param="linear_num_value_heads",
            )
        return GatedDeltaNet(
            sizes, parts.build, eps=float(hf.rms_norm_eps), shards=self.shards(sizes)
        )

    @staticmethod
    def shards(sizes: DeltaSizes) -> Mapping[str, int]:
        """Return the projection's checkpoint tensors, with their widths."""
        qkv, gate, beta, step = sizes.projection
        return {"qkvz": qkv + gate, "ba": beta + step}


class Qwen3NextDecoder(Decoder):
    block = Qwen3NextBlock


def by_kind(num_groups: int, *widths: int) -> RowOrder:
    """Return the order from groups with `widths` rows of each kind to all rows of the first kind,
    then of the second, …
    """
    group, start = sum(widths), 0
    order: list[int] = []
    for width in widths:
        for first in range(start, num_groups * group, group):
            order += range(first, first + width)
        start += width
    return RowOrder(tuple(order))


class Qwen3NextForCausalLM(CausalLM):
    config_fields = EXPERTS | SPARSE_LAYERS | DELTA_NETS | {"shared_expert_intermediate_size": SIZE}
    attention = GatedAttention
    decoder = Qwen3NextDecoder
    weight_map = dataclasses.replace(
        Qwen2MoeForCausalLM.weight_map,
        stacked={
            **CausalLM.weight_map.stacked,
            "in_proj_qkvz": Shard("in_proj", "qkvz"),
            "in_proj_ba": Shard("in_proj", "ba"),
        },
        ignored=("mtp.",),
    )

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        """Queries and gates are interleaved by head; delta nets are stored by key head."""
        sizes = delta_sizes(config.hf_config)
        each = sizes.num_value_heads // sizes.num_key_heads
        values = each * sizes.value_dim
        groups = sizes.num_key_heads
        return {
            "q_proj": RowOrder.by_part(config.num_heads, 2, config.head_dim),
            "in_proj_qkvz": by_kind(groups, sizes.key_dim, sizes.key_dim, values, values),
            "in_proj_ba": by_kind(groups, each, each),
        }

    mlp = staticmethod(Qwen2MoeForCausalLM.mlp)


class Qwen3_5Block(Qwen3NextBlock):
    @staticmethod
    def shards(sizes: DeltaSizes) -> Mapping[str, int]:
        return dict(zip(("qkv", "z", "b", "a"), sizes.projection, strict=True))


class Qwen3_5Decoder(Decoder):
    block = Qwen3_5Block


class Qwen3_5ForCausalLM(CausalLM):
    config_fields = DELTA_NETS
    attention = GatedAttention
    decoder = Qwen3_5Decoder
    weight_map = dataclasses.replace(
        CausalLM.weight_map,
        stacked={
            **CausalLM.weight_map.stacked,
            **{f"in_proj_{part}": Shard("in_proj", part) for part in ("qkv", "z", "b", "a")},
        },
        ignored=("mtp.", "model.visual."),
    )

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        """Queries and gates are interleaved by head."""
        return {"q_proj": RowOrder.by_part(config.num_heads, 2, config.head_dim)}


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    config_fields = EXPERTS | {"shared_expert_intermediate_size": SIZE}
    weight_map = dataclasses.replace(
        Qwen3_5ForCausalLM.weight_map, names=Qwen2MoeForCausalLM.weight_map.names
    )

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        return shared_mixture(config.hf_config, build, renormalize=True)
