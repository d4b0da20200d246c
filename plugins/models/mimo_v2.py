"""MiMo-V2-Flash: values narrower than keys, windows with sinks and more keys in most layers, and
DeepSeek's mixtures."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import msgspec
import torch
import torch.nn.functional as F

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.rotary import Rotary
from ...core.protocols.attention import AttentionSpec
from .decoder import CausalLM, Decoder, rotaries_by_type
from .deepseek_moe import DeepseekMoeForCausalLM
from .windows import WindowedAttention, window_of_layer


class MiMoV2Attention(WindowedAttention):
    """Values get zeros behind them, up to the width of keys, and what attention returns is cut."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        hf = copy.copy(config.hf_config)
        windowed = window_of_layer(hf, layer) is not None
        if windowed:
            keys = getattr(hf, "swa_num_key_value_heads", None) or 2 * config.num_kv_heads
            hf.num_key_value_heads = keys
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
        """As `SelfAttention.heads`, of values' width: → [num_tokens, num_heads * value_dim]"""
        rest, values = qkv.tensor_split((-self.num_kv_heads * self.value_dim,), dim=-1)
        heads = values.reshape(len(qkv), -1, self.value_dim) * self.value_scale
        padded = F.pad(heads, (0, self.head_dim - self.value_dim)).flatten(1)
        out = super().heads(torch.cat([rest, padded], dim=-1), rotary, context)
        return out.view(len(qkv), -1, self.head_dim)[..., : self.value_dim].flatten(1)


class MiMoV2Decoder(Decoder):
    rotaries_of = staticmethod(rotaries_by_type)


class MiMoV2FlashForCausalLM(DeepseekMoeForCausalLM):
    """Layers of the checkpoint that predict further tokens are not loaded."""

    tensor_parallel = True
    attention = MiMoV2Attention
    decoder = MiMoV2Decoder
    weight_map = dataclasses.replace(CausalLM.weight_map, names={"sinks": "attention_sink_bias"})

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """Raises ConfigError for sizes and sinks that no published checkpoint has."""
        hf = config.hf_config
        for field, known in (
            ("swa_num_attention_heads", config.num_heads), ("swa_head_dim", config.head_dim),
            ("swa_v_head_dim", hf.v_head_dim), ("add_swa_attention_sink_bias", True),
            ("add_full_attention_sink_bias", False),
        ):  # fmt: skip
            if (value := getattr(hf, field, known)) != known:
                raise ConfigError(f"{field}: {value} is not supported, only {known}", param=field)
        if not 0 < hf.v_head_dim <= config.head_dim:
            raise ConfigError(
                f"v_head_dim: {hf.v_head_dim} is not supported, only up to head_dim "
                f"({config.head_dim})", param="v_head_dim",
            )  # fmt: skip
        super().__init__(config, build)
        ignored = (*self.weight_map.ignored, "model.mtp.")
        self.weight_map = dataclasses.replace(self.weight_map, ignored=ignored)
