"""Phi-3.5-MoE: layer norms, biases in attention and the head, and two experts for each token, each
weighted among experts of similar logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.rotary import Rotary
from ...core.nn.routing import Routing, RoutingRule
from .decoder import CausalLM
from .expert_fields import EXPERTS
from .mistral import MistralAttention
from .mixtral import MixtralForCausalLM
from .parts import LayerNormBlock, LayerNormDecoder


class PhimoeAttention(MistralAttention):
    @staticmethod
    def qkv_bias(hf: Any) -> bool:
        return bool(hf.attention_bias)

    output_bias = qkv_bias


class PhimoeBlock(LayerNormBlock):
    """The configuration calls the norms' eps `rms_norm_eps`."""

    @classmethod
    def make_norm(cls, hf: Any, build: BuildContext) -> nn.Module:
        return cls.norm(hf.hidden_size, float(hf.rms_norm_eps), build)


class PhimoeDecoder(LayerNormDecoder):
    block = PhimoeBlock

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        """Cosines and sines have factors for short or for long texts."""
        rope = config.rope_parameters
        original = rope.get("original_max_position_embeddings") or config.max_model_len
        scale = rope.get("long_mscale" if config.max_model_len > original else "short_mscale")
        if rope["rope_type"] == "longrope" and scale is not None:
            rope = {**rope, "attention_factor": scale}
        return [Rotary(config, build, rope)] * config.num_layers


class SparseMixer(SparseMLP):
    """The weight of an expert is its probability among experts with similar logits. Source: GRIN
    (arXiv 2409.12136).
    """

    margin = 0.01

    def route(self, logits: torch.Tensor) -> Routing:
        scores = logits.float()
        rest, weights, experts = scores, [], []
        for _ in range(2):
            best, chosen = rest.max(dim=-1, keepdim=True)
            far = (best - scores) / scores.abs().clamp(min=best) > 2 * self.margin
            near = rest.masked_fill(far, float("-inf")).softmax(dim=-1)
            weights.append(near.gather(1, chosen))
            experts.append(chosen)
            rest = rest.scatter(1, chosen, float("-inf"))
        return Routing(torch.cat(weights, dim=1), torch.cat(experts, dim=1).to(torch.int32))


class PhimoeForCausalLM(CausalLM):
    batch_invariant = False
    config_fields = EXPERTS
    attention = PhimoeAttention
    decoder = PhimoeDecoder
    weight_map = MixtralForCausalLM.weight_map

    @staticmethod
    def head_bias(hf: Any) -> bool:
        return bool(hf.lm_head_bias)

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        if hf.num_experts_per_tok != 2:
            raise ConfigError(
                f"num_experts_per_tok: {hf.num_experts_per_tok} is not 2",
                param="num_experts_per_tok",
            )
        mixture = SparseMixer(
            hf.num_local_experts, RoutingRule(2), hf.hidden_size, hf.intermediate_size,
            hf.hidden_act, build,
        )  # fmt: skip
        mixture.margin = float(hf.router_jitter_noise)
        return mixture
