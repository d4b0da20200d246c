"""Qwen3 with a mixture of experts in most layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.experts import SparseMLP
from ...core.nn.routing import RoutingRule
from .decoder import CausalLM
from .qwen3 import Qwen3Attention


class Qwen3MoeAttention(Qwen3Attention):
    """The window, where there is one, is every layer's."""

    @staticmethod
    def sliding_window(hf: Any, layer: int) -> int | None:
        window: int | None = hf.sliding_window
        return window


class Qwen3MoeForCausalLM(CausalLM):
    tensor_parallel = True
    attention = Qwen3MoeAttention

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        if not is_sparse(hf, layer):
            return CausalLM.mlp(config, layer, build)
        return SparseMLP(
            hf.num_experts,
            RoutingRule(hf.num_experts_per_tok, renormalize=hf.norm_topk_prob),
            hf.hidden_size,
            hf.moe_intermediate_size,
            hf.hidden_act,
            build,
        )


def is_sparse(hf: Any, layer: int) -> bool:
    """Return whether the layer has a mixture: every `decoder_sparse_step`th one, but for those of
    `mlp_only_layers`. Raises ConfigError."""
    if hf.decoder_sparse_step < 1:
        raise ConfigError(
            f"decoder_sparse_step: {hf.decoder_sparse_step} is no number of layers",
            param="decoder_sparse_step",
        )
    return layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0
