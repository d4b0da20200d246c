"""OLMo Hybrid: gated delta nets after norms in most layers, OLMo 2's attention in the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.rotary import Rotary
from ...core.nn.state.layer import GateNorm, MergedConv, StateMixer
from ...core.nn.state.operations import ChannelDeltaWeights
from ...core.parallel.ranks import Product
from ...core.parallel.sharding import HeadShare, Sharding
from .blocks import Block, BlockParts
from .decoder import CausalLM, Decoder
from .olmo2 import Olmo2Attention
from .qwen3_next import DELTA_NETS

NORM_EPS = 1e-5
"""Eps of the gated norm, instead of `rms_norm_eps`."""
PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


class OlmoDeltaNet(StateMixer):
    """Projections; convolution of queries, keys and values; delta rule with step sizes up to 2;
    gated norm of each head; projection. Ranks divide the heads.
    """

    def __init__(self, hf: Any, build: BuildContext) -> None:
        heads, key_heads = hf.linear_num_value_heads, hf.linear_num_key_heads
        if heads % key_heads:
            raise ConfigError(
                f"linear_num_value_heads: {heads} is no multiple of linear_num_key_heads "
                f"{key_heads}",
                param="linear_num_value_heads",
            )
        own = HeadShare.of(heads, key_heads, build.ranks.tensor)
        key, value = hf.linear_key_head_dim, hf.linear_value_head_dim
        keys, values = own.rows(key)["k"], own.rows(value)["q"]
        widths = {"q": key_heads * key, "k": key_heads * key, "v": heads * value}
        shares = {"q": keys, "k": keys, "v": values}
        self.sizes = [share.stop - share.start for share in shares.values()]
        super().__init__(
            conv=((hf.linear_conv_kernel_dim - 1, sum(self.sizes)), build.dtype),
            delta=((own.num_heads, key, value), torch.float32),
        )
        self.operations, self.ranks = build.operations, build.ranks
        self.num_heads, self.key_dim, self.value_dim = own.num_heads, key, value
        self.num_key_heads = own.num_kv_heads
        self.strength = 2.0 if hf.linear_allow_neg_eigval else 1.0
        self.qkv_proj = MergedLinear(
            hf.hidden_size, {**widths, "g": heads * value, "b": heads, "a": heads}, build,
            shard="out", shares={**shares, "g": values, "b": own.queries, "a": own.queries},
        )  # fmt: skip
        self.conv1d = MergedConv(widths, shares, hf.linear_conv_kernel_dim, build)
        self.dt_bias = nn.Parameter(build.empty(own.num_heads))
        self.A_log = nn.Parameter(build.empty(own.num_heads))
        self.shardings: dict[str, Sharding] = {}
        if build.ranks.tensor.size > 1:
            part = Sharding(0, {"": heads}, {"": (own.queries,)})
            self.shardings = {"A_log": part, "dt_bias": part}
        self.o_norm = GateNorm(value, build)
        self.o_proj = Linear(heads * value, hf.hidden_size, build, shard="in", share=values)
        self.weights: ChannelDeltaWeights

    def after_loading(self) -> None:
        """Derive the recurrence's float32 weights: the channels of a head decay alike."""
        rate = -self.A_log.detach().float().exp()
        bias = self.dt_bias.detach().float()[:, None].expand(-1, self.key_dim).contiguous()
        self.weights = ChannelDeltaWeights(rate, bias, strength=self.strength)

    def mix(
        self, hidden: torch.Tensor, norm: nn.Module | None, context: ForwardContext
    ) -> tuple[Product, torch.Tensor]:
        rows, heads = context.layout.state_rows, self.num_heads
        parts = [sum(self.sizes), heads * self.value_dim, heads, heads]
        qkv, gate, beta, step = self.qkv_proj(hidden, norm=norm).split(parts, dim=-1)
        qkv = self.operations.causal_conv(
            qkv, self.conv1d.kernel, None, self.state("conv"), rows, silu=True
        )
        keys = self.num_key_heads * self.key_dim
        query, key, value = qkv.tensor_split((keys, 2 * keys), dim=-1)
        query, key = (self._of_values(part) for part in (query, key))
        value = value.view(len(value), heads, -1)
        y = self.operations.channel_delta_rule(
            query, key, value, step[:, :, None].expand(-1, -1, self.key_dim).contiguous(), beta,
            self.weights, self.state("delta"), rows,
        ).flatten(-2)  # fmt: skip
        y = self.operations.gated_rms_norm(
            y, gate, self.o_norm.weight, NORM_EPS, group_size=self.value_dim, gate_first=False
        )
        return self.o_proj, y

    def _of_values(self, x: torch.Tensor) -> torch.Tensor:
        """Repeat queries or keys for each value head of theirs: [T, num_key_heads * key_dim] → [T,
        num_heads, key_dim].
        """
        x = x.view(len(x), self.num_key_heads, self.key_dim)
        each = self.num_heads // self.num_key_heads
        return x if each == 1 else x.repeat_interleave(each, dim=1)


class OlmoHybridBlock(Block):
    """Norms before a delta net and its MLP, or after attention and its MLP."""

    def __init__(self, parts: BlockParts, layer: int) -> None:
        nn.Module.__init__(self)
        hf, build = parts.config.hf_config, parts.build
        self.attends = hf.layer_types[layer] == "full_attention"
        for name in POST_NORMS if self.attends else PRE_NORMS:
            setattr(self, name, self.make_norm(hf, build))
        if self.attends:
            self.self_attn = parts.make_attention(layer)
        else:
            self.linear_attn = OlmoDeltaNet(hf, build)
        self.mlp = parts.make_mlp(layer)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        out: torch.Tensor
        if not self.attends:
            hidden = self.linear_attn(hidden, self.input_layernorm, rotary, context)
            out = self.mlp(hidden, self.post_attention_layernorm)
            return out
        post_attn_norm, post_mlp_norm = (getattr(self, name) for name in POST_NORMS)
        attn_output = self.self_attn(hidden, None, rotary, context, add=False)
        hidden = post_attn_norm.add(attn_output, hidden)
        out = post_mlp_norm.add(self.mlp(hidden, None, add=False), hidden)
        return out


class OlmoHybridDecoder(Decoder):
    block = OlmoHybridBlock

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        """Without a base in the configuration, nothing rotates."""
        rope: Any = getattr(config.hf_config, "rope_parameters", None) or {}
        turns = rope.get("rope_theta") is not None
        return [Rotary(config, build) if turns else None] * config.num_layers


class OlmoHybridForCausalLM(CausalLM):
    config_fields = DELTA_NETS
    attention = Olmo2Attention
    decoder = OlmoHybridDecoder
    weight_map = dataclasses.replace(
        CausalLM.weight_map,
        stacked={
            **CausalLM.weight_map.stacked,
            **{f"{part}_proj": Shard("qkv_proj", part) for part in ("g", "b", "a")},
            **{f"{part}_conv1d": Shard("conv1d", part) for part in ("q", "k", "v")},
        },
        names={
            "input_layernorm": "attention_layer_norm",
            "post_attention_layernorm": "feedforward_layer_norm",
        },
    )
