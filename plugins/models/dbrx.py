"""DBRX: layer norms without biases, clipped queries, keys and values, and mixtures whose experts
the checkpoint stacks by rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import StackedExperts, WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.norm import BiaslessLayerNorm
from ...core.nn.rotary import Rotary
from ...core.nn.routing import RoutingRule
from ...core.protocols.field_kinds import INTEGER
from .blocks import Block
from .decoder import CausalLM, Decoder
from .parts import ClippedAttention, FusedAttention


class DbrxAttention(ClippedAttention, FusedAttention):
    @staticmethod
    def clip(hf: Any) -> float | None:
        limit: float | None = hf.attn_config.clip_qkv
        return limit


class DbrxBlock(Block):
    norm = BiaslessLayerNorm

    @classmethod
    def make_norm(cls, hf: Any, build: BuildContext) -> nn.Module:
        """Create a norm; configurations do not state its eps."""
        return cls.norm(hf.hidden_size, 1e-5, build)


class DbrxDecoder(Decoder):
    block = DbrxBlock

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        """The attention's base, where it has one, takes precedence."""
        rope = config.rope_parameters
        if theta := getattr(config.hf_config.attn_config, "rope_theta", None):
            rope = {**rope, "rope_theta": theta}
        return [Rotary(config, build, rope)] * config.num_layers


@dataclasses.dataclass(frozen=True)
class StackedWeightMap(WeightMap):
    """For checkpoints whose tensors of all experts are [num_experts * rows, columns]."""

    num_experts: int = 1

    def pieces(
        self, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, str | None, torch.Tensor]]:
        if self.together_at(name) is not None and tensor.shape[0] % self.num_experts == 0:
            tensor = tensor.reshape(self.num_experts, -1, *tensor.shape[1:])
        yield from super().pieces(name, tensor)


class DbrxForCausalLM(CausalLM):
    config_fields = {"max_seq_len": INTEGER}
    attention = DbrxAttention
    decoder = DbrxDecoder
    weight_map = StackedWeightMap(
        prefixes={"transformer.": "model."},
        names={
            "experts.all_gate": "experts.mlp.w1",
            "experts.all_up": "experts.mlp.v1",
            "experts.all_down": "experts.mlp.w2",
            "embed_tokens": "wte", "layers": "blocks", "norm": "norm_f",
            "input_layernorm": "norm_attn_norm.norm_1",
            "post_attention_layernorm": "norm_attn_norm.norm_2",
            "self_attn": "norm_attn_norm.attn", "qkv_proj": "Wqkv", "o_proj": "out_proj",
            "mlp": "ffn", "gate": "router.layer",
        },
        together={
            "all_gate": StackedExperts("gate_up_proj.weight", ("gate",)),
            "all_up": StackedExperts("gate_up_proj.weight", ("up",)),
            "all_down": StackedExperts("down_proj.weight", transposed=True),
        },
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        weights: Any = type(self).weight_map
        count = config.hf_config.ffn_config.moe_num_experts
        self.weight_map = dataclasses.replace(weights, num_experts=count)

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        options: Any = config.hf_config.ffn_config
        power = options.moe_normalize_expert_weights
        if power not in (None, 1):
            field = "ffn_config.moe_normalize_expert_weights"
            raise ConfigError(f"{field}: {power} is not supported, only 1 or null", param=field)
        return SparseMLP(
            options.moe_num_experts,
            RoutingRule(options.moe_top_k, renormalize=power is not None),
            config.hidden_size,
            options.ffn_hidden_size,
            options.ffn_act_fn["name"],
            build,
        )
