"""Apertus: norms of heads, and an MLP without a gate whose activation has weights (xIELU)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.mlp import PlainMLP
from ...core.protocols.field_kinds import SIZE
from .decoder import QKV_SHARDS, CausalLM, HeadlessLM
from .qwen3 import Qwen3Attention


class XIELU(nn.Module):
    """Source: xIELU (arXiv 2411.13010): a parabola above 0, an exponential one below."""

    alpha_p: nn.Parameter
    alpha_n: nn.Parameter
    beta: nn.Parameter
    eps: nn.Parameter

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ())):
            setattr(self, name, nn.Parameter(build.empty(*shape)))
        self.operations = build.operations
        self.weights: torch.Tensor
        weights = torch.empty(4, device=build.device, dtype=torch.float32)
        self.register_buffer("weights", weights, persistent=False)

    def after_loading(self) -> None:
        names = (self.alpha_p, self.alpha_n, self.beta, self.eps)
        above, below, beta, eps = (part.detach().float().view(()) for part in names)
        below = F.softplus(below) + beta
        self.weights.copy_(torch.stack([F.softplus(above), below, beta, eps]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operations.xielu(x, self.weights)


class XieluMLP(PlainMLP):
    def __init__(self, hidden_size: int, intermediate_size: int, build: BuildContext) -> None:
        super().__init__(hidden_size, intermediate_size, "silu", build, bias=False)
        self.act_fn = self.activation = XIELU(build)
        self.fused_activation = None


class ApertusForCausalLM(CausalLM):
    attention = Qwen3Attention
    weight_map = WeightMap(
        stacked=QKV_SHARDS,
        tied=HeadlessLM.weight_map.tied,
        names={
            "input_layernorm": "attention_layernorm",
            "post_attention_layernorm": "feedforward_layernorm",
        },
    )

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        if hf.hidden_act != "xielu":
            raise ConfigError(f"hidden_act: {hf.hidden_act!r} is not supported", param="hidden_act")
        return XieluMLP(hf.hidden_size, hf.intermediate_size, build)


@dataclasses.dataclass(frozen=True)
class FewerTokensMap(WeightMap):
    """For checkpoints with more embedding rows than the model has tokens."""

    stored: int = 0
    kept: int = 0
    """Rows that are loaded, from the first on."""

    def pieces(
        self, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, str | None, torch.Tensor]]:
        embeds = self.renamed(name) == "model.embed_tokens.weight"
        cut = embeds and tensor.shape[0] == self.stored
        yield from super().pieces(name, tensor[: self.kept] if cut else tensor)


class Apertus1p5TextForCausalLM(ApertusForCausalLM):
    """Loads the text tokens only: embeddings of image and sound codes follow them."""

    config_fields = {"output_vocab_size": SIZE}
    weight_map: WeightMap = FewerTokensMap(
        stacked=QKV_SHARDS, tied=HeadlessLM.weight_map.tied,
        names=ApertusForCausalLM.weight_map.names,
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.weight_map = dataclasses.replace(
            self.weight_map, stored=config.hf_config.vocab_size, kept=config.vocab_size
        )  # type: ignore[call-arg]

    @classmethod
    def vocabulary_size(cls, hf_config: Any) -> int:
        return int(hf_config.output_vocab_size or hf_config.vocab_size)
