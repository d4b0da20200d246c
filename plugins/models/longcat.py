"""LongCat-Flash: a layer has two latent attentions, each before an MLP, and one mixture, which
reads the first MLP's input and is added after the second. Some experts compute nothing.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.experts import Router, SparseMLP, check_features
from ...core.nn.mlp import GatedMLP
from ...core.nn.rotary import Rotary
from ...core.nn.routing import RoutingRule
from ...core.protocols.field_kinds import INTEGER
from .blocks import Block, BlockParts
from .decoder import CausalLM
from .expert_fields import DEEPSEEK_EXPERTS
from .latent import LATENT, LATENT_MAP, LatentDecoder, LatentSelfAttention


class LongcatAttention(LatentSelfAttention):
    """Scales queries, and the unrotated part of latents, to a hidden state's length."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        hf = config.hf_config
        self.scales = [
            (norm, (hf.hidden_size / norm.weight.shape[0]) ** 0.5)
            for name, norm in (("q", self.q_a_layernorm), ("kv", self.kv_a_layernorm))
            if getattr(hf, f"mla_scale_{name}_lora", True)
        ]

    def after_loading(self) -> None:
        """Fold the scales into the norms: their products are linear."""
        super().after_loading()
        for norm, scale in self.scales:
            norm.weight.data.mul_(scale)


class IdentityMixture(SparseMLP):
    """A mixture with further experts, numbered after the others, that return their input.

    Kernels treat them as another rank's experts, which add nothing.
    """

    def __init__(
        self, num_experts: int, num_identities: int, rule: RoutingRule, config: ModelConfig,
        build: BuildContext,
    ) -> None:  # fmt: skip
        hf = config.hf_config
        inner = hf.expert_ffn_hidden_size
        check_features(build.operations, frozenset({"experts.foreign"}))
        super().__init__(
            num_experts, rule, hf.hidden_size, inner, hf.hidden_act, build, score_bias=True,
            wide_router=True,
        )  # fmt: skip
        self.num_experts = num_experts
        self.num_choices = num_experts + num_identities
        self.gate = Router(
            num_experts + num_identities, hf.hidden_size, build, score_bias=True, wide=True
        )
        for field, part in (
            ("all2all_backend", self.experts.exchange), ("enable_eplb", self.experts.balance)
        ):  # fmt: skip
            if part is not None:
                raise ConfigError(
                    f"{field}: is not supported for models with experts that compute nothing",
                    param=field,
                )

    def forward(
        self, hidden: torch.Tensor, norm: nn.Module | None, *, add: bool = True
    ) -> torch.Tensor:
        x = hidden if norm is None else norm(hidden)
        routing = self.choose(x)
        computed = routing.experts < self.num_experts
        same = x * routing.weights.masked_fill(computed, 0.0).sum(1, keepdim=True).to(x.dtype)
        routing = self.experts.local(routing._replace(num_experts=self.gate.weight.shape[0]))

        def product(x: torch.Tensor, *, residual: torch.Tensor | None = None) -> torch.Tensor:
            return self.operations.experts(
                x, routing, self.experts.gate_up_proj.expert_weight,
                self.experts.down_proj.expert_weight,
                residual=torch.zeros_like(x) if residual is None else residual,
            )  # fmt: skip

        return self.ranks.add(hidden + same if add else same, (product, x))


class LongcatBlock(Block):
    """The mixture reads the first MLP's input, so it may overlap all that follows."""

    self_attn: Any
    input_layernorm: nn.ModuleList
    post_attention_layernorm: nn.ModuleList

    def __init__(self, parts: BlockParts, layer: int) -> None:
        nn.Module.__init__(self)
        hf: Any = parts.config.hf_config
        build = parts.build
        for name in self.norms:
            setattr(self, name, nn.ModuleList(self.make_norm(hf, build) for _ in range(2)))
        self.self_attn = nn.ModuleList(parts.make_attention(layer) for _ in range(2))
        self.mlps = nn.ModuleList(
            GatedMLP(hf.hidden_size, hf.ffn_hidden_size, hf.hidden_act, build) for _ in range(2)
        )
        self.mlp = parts.make_mlp(layer)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        mlps: Any = self.mlps
        hidden = self.self_attn[0](hidden, self.input_layernorm[0], rotary, context)
        normed = self.post_attention_layernorm[0](hidden)
        shortcut: torch.Tensor = self.mlp(normed, None, add=False)
        hidden = mlps[0].project(mlps[0].inner(normed), hidden)
        hidden = self.self_attn[1](hidden, self.input_layernorm[1], rotary, context)
        out: torch.Tensor = mlps[1](hidden, self.post_attention_layernorm[1])
        return out + shortcut


class LongcatDecoder(LatentDecoder):
    block = LongcatBlock

    @staticmethod
    def num_blocks(hf: Any) -> int:
        """Half of `num_hidden_layers`, which counts attentions."""
        return int(hf.num_layers)


@dataclasses.dataclass(frozen=True)
class LongcatWeightMap(WeightMap):
    """`transformers` also writes gates of identity experts."""

    num_experts: int | None = None

    def own(self, name: str) -> str | None:
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert and self.num_experts is not None and int(expert[1]) >= self.num_experts:
            return None
        return super().own(name)


class LongcatFlashForCausalLM(CausalLM):
    batch_invariant = False
    config_fields = DEEPSEEK_EXPERTS | LATENT | {"ffn_hidden_size": INTEGER}
    attention = LongcatAttention
    decoder = LongcatDecoder
    weight_map = LongcatWeightMap(
        stacked=LATENT_MAP.stacked,
        tied=LATENT_MAP.tied,
        names={
            "gate.e_score_correction_bias": "router.e_score_correction_bias",
            "gate": "router.classifier",
        },
        ignored=("model.mtp.",),
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        weights: Any = type(self).weight_map
        count = config.hf_config.n_routed_experts
        self.weight_map = dataclasses.replace(weights, num_experts=count)

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        """Create the mixture. Raises ConfigError for experts that neither compute nor return their
        input.
        """
        hf = config.hf_config
        for field, served in (("zero_expert_type", "identity"), ("router_bias", False)):
            value = getattr(hf, field, None)
            if value not in (None, served):
                raise ConfigError(f"{field}: {value!r} is not supported", param=field)
        rule = RoutingRule(hf.moe_topk, factor=hf.routed_scaling_factor)
        return IdentityMixture(hf.n_routed_experts, hf.zero_expert_num or 0, rule, config, build)
