"""Qwen3 with a mixture of experts in most layers, also as the text part of Qwen3-VL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import StackedExperts
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.routing import RoutingRule
from .decoder import CausalLM
from .expert_fields import EXPERTS, SPARSE_LAYERS
from .qwen3 import Qwen3Attention
from .windows import QWEN_WINDOWS


class Qwen3MoeAttention(Qwen3Attention):
    """A window applies to every layer."""

    @staticmethod
    def sliding_window(hf: Any, layer: int) -> int | None:
        window: int | None = hf.sliding_window
        return window


class Qwen3MoeForCausalLM(CausalLM):
    config_fields = EXPERTS | SPARSE_LAYERS | QWEN_WINDOWS
    attention = Qwen3MoeAttention

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        if not is_sparse(hf, layer):
            return CausalLM.mlp(config, layer, build)
        return SparseMLP(
            hf.num_experts,
            RoutingRule(
                hf.num_experts_per_tok, renormalize=bool(getattr(hf, "norm_topk_prob", True))
            ),
            hf.hidden_size,
            hf.moe_intermediate_size,
            hf.hidden_act,
            build,
        )


class Qwen3VLMoeTextForCausalLM(Qwen3MoeForCausalLM):
    """The text part of Qwen3-VL: one checkpoint tensor for all experts."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        hf = config.hf_config
        up, down = hf.hidden_size, hf.moe_intermediate_size
        self.weight_map = replace(self.weight_map, together={
            "gate_up_proj": StackedExperts("gate_up_proj.weight", ("gate", "up"), columns=up,
                                     joined=True),
            "down_proj": StackedExperts("down_proj.weight", columns=down),
        })  # fmt: skip


def is_sparse(hf: Any, layer: int) -> bool:
    """Return whether the layer has a mixture. Raises ConfigError."""
    if hf.decoder_sparse_step < 1:
        raise ConfigError(
            f"decoder_sparse_step: {hf.decoder_sparse_step} is no number of layers",
            param="decoder_sparse_step",
        )
    return layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0
