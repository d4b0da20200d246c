"""MiMo-V2: values narrower than keys, windows with sinks and more keys in most layers, and
DeepSeek's mixtures. From V2.5 on, queries, keys and values are one checkpoint tensor.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
import torch.nn.functional as F

from ...core.errors import ConfigError, LoadError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.rotary import Rotary
from ...core.protocols.attention import AttentionSpec
from ...core.protocols.field_kinds import INTEGER
from .decoder import CausalLM, Decoder, rotaries_by_type
from .deepseek_moe import DeepseekMoeForCausalLM
from .windows import WindowedAttention, window_of_layer


def kv_heads_of(config: ModelConfig, layer: int) -> int:
    if window_of_layer(config.hf_config, layer) is None:
        return config.num_kv_heads
    own = getattr(config.hf_config, "swa_num_key_value_heads", None)
    return int(own or 2 * config.num_kv_heads)


class MiMoV2Attention(WindowedAttention):
    """Pads values with zeros to the width of keys, and cuts the output."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        hf = copy.copy(config.hf_config)
        windowed = window_of_layer(hf, layer) is not None
        hf.num_key_value_heads = kv_heads_of(config, layer)
        super().__init__(dataclasses.replace(config, hf_config=hf), layer, build)
        self.value_dim, scale = int(hf.v_head_dim), hf.attention_value_scale
        self.value_scale = 1.0 if scale is None else float(scale)
        keys, rows = hf.num_key_value_heads, self.own.rows(self.head_dim)
        values = self.own.rows(self.value_dim)
        self.qkv_proj = MergedLinear(
            hf.hidden_size,
            {
                "q": self.all_heads * self.head_dim,
                "k": keys * self.head_dim,
                "v": keys * self.value_dim,
            },
            build,
            bias=self.qkv_bias(hf),
            shard="out",
            shares={**rows, "v": values["v"]},
        )
        self.o_proj = Linear(
            self.all_heads * self.value_dim, hf.hidden_size, build, shard="in", share=values["q"]
        )
        if windowed:
            self.add_sinks(build)

    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        sinks = window_of_layer(hf, layer) is not None
        return msgspec.structs.replace(super().spec(hf, layer), sinks=sinks)

    def heads(
        self, qkv: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        rest, values = qkv.tensor_split((-self.num_kv_heads * self.value_dim,), dim=-1)
        heads = values.reshape(len(qkv), -1, self.value_dim) * self.value_scale
        padded = F.pad(heads, (0, self.head_dim - self.value_dim)).flatten(1)
        out = super().heads(torch.cat([rest, padded], dim=-1), rotary, context)
        return out.view(len(qkv), -1, self.head_dim)[..., : self.value_dim].flatten(1)


class MiMoV2Decoder(Decoder):
    rotaries_of = staticmethod(rotaries_by_type)


class MiMoV2FlashForCausalLM(DeepseekMoeForCausalLM):
    config_fields = {"v_head_dim": INTEGER}
    attention = MiMoV2Attention
    decoder = MiMoV2Decoder
    weight_map = dataclasses.replace(CausalLM.weight_map, names={"sinks": "attention_sink_bias"})

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf = config.hf_config
        for field, served in (
            ("swa_num_attention_heads", config.num_heads), ("swa_head_dim", config.head_dim),
            ("swa_v_head_dim", hf.v_head_dim), ("add_swa_attention_sink_bias", True),
            ("add_full_attention_sink_bias", False),
        ):  # fmt: skip
            if (value := getattr(hf, field, served)) != served:
                raise ConfigError(f"{field}: {value} is not supported, only {served}", param=field)
        if not 0 < hf.v_head_dim <= config.head_dim:
            raise ConfigError(
                f"v_head_dim: {hf.v_head_dim} is not supported, only up to head_dim "
                f"({config.head_dim})", param="v_head_dim",
            )  # fmt: skip
        super().__init__(config, build)
        ignored = (*self.weight_map.ignored, "model.mtp.")
        self.weight_map = dataclasses.replace(self.weight_map, ignored=ignored)


BLOCK = 128
"""Rows per scale of a float8 weight."""


@dataclasses.dataclass(frozen=True)
class FusedWeightMap(WeightMap):
    """Splits one tensor into queries, keys and values.

    In float8, its rows are chunks of [queries, keys, values], with blocks of scales per chunk. In
    other types, all queries come first.
    """

    chunks: int = 1
    fused: tuple[tuple[int, int, int], ...] = ()

    def pieces(
        self, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, str | None, torch.Tensor]]:
        at = re.search(r"\.(\d+)\.self_attn\.qkv_proj\.([^.]+)$", self.renamed(name))
        if at is None or tensor.dim() == 0:
            yield from super().pieces(name, tensor)
            return
        sizes, scaled = self.fused[int(at[1])], at[2] == "weight_scale_inv"
        count = self.chunks if scaled or tensor.dtype == torch.float8_e4m3fn else 1
        rows = sum(sizes) // count
        stored = -(-rows // BLOCK) if scaled else rows
        if tensor.shape[0] != count * stored:
            raise LoadError(
                f"tensor {name!r} has {tensor.shape[0]} rows, and {count} chunks of queries, keys "
                f"and values have {count * stored}"
            )
        parts = tensor.view(count, stored, *tensor.shape[1:])
        if scaled:
            parts = parts.repeat_interleave(BLOCK, 1)[:, :rows]
        split = torch.split(parts, [size // count for size in sizes], dim=1)
        for shard, part in zip("qkv", split, strict=True):
            yield self.renamed(name), shard, part.flatten(0, 1)


class MiMoV2ForCausalLM(MiMoV2FlashForCausalLM):
    weight_map: WeightMap = FusedWeightMap(
        stacked=CausalLM.weight_map.stacked, tied=CausalLM.weight_map.tied,
        names=MiMoV2FlashForCausalLM.weight_map.names, text_part=True,
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        hf, count, chunks = config.hf_config, config.num_heads, config.num_kv_heads
        fused = []
        for layer in range(config.num_layers):
            keys = kv_heads_of(config, layer)
            if keys % chunks or count % chunks:
                raise ConfigError(
                    f"swa_num_key_value_heads: {keys} key heads and {count} queries are not "
                    f"supported, only multiples of num_key_value_heads ({chunks})",
                    param="swa_num_key_value_heads",
                )
            fused.append((count * config.head_dim, keys * config.head_dim, keys * hf.v_head_dim))
        self.weight_map = dataclasses.replace(self.weight_map, chunks=chunks, fused=tuple(fused))  # type: ignore[call-arg]
