"""Ling 2.5 and 2.6, Ring 2.5: lightning attention in most layers, latent attention in some, and
Ling's mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.linear import Linear, MergedLinear
from ...core.nn.norm import RMSNorm
from ...core.nn.operations import HeadLayout
from ...core.nn.rotary import Rotary
from ...core.nn.state.layer import GateNorm, StateMixer
from ...core.nn.state.operations import ScanWeights
from ...core.parallel.sharding import HeadShare, Sharding
from ...core.protocols.field_kinds import INTEGER
from .bailing_moe import BailingMoeForCausalLM
from .blocks import BlockParts
from .latent import LATENT, LATENT_MAP, LatentDecoder, NormedLatentAttention, check_sizes
from .mixer import HybridBlock
from .parts import alibi_slopes


class GroupsNorm(GateNorm):
    """The weight of a grouped norm, sharded over ranks by group."""

    def __init__(self, own: slice, width: int, build: BuildContext) -> None:
        """own: this rank's channels, of `width`"""
        super().__init__(own.stop - own.start, build)
        self.shardings = {"weight": Sharding(0, {"": width}, {"": (own,)})}


class RotatedLightningAttention(StateMixer):
    """Queries and keys are normed and rotated; S = exp(-slope) S + k vᵀ, y = Sᵀ q; a norm of groups
    of heads, times the sigmoid of a gate.  Ranks divide the groups.
    """

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        hf, heads = config.hf_config, config.num_heads
        size, self.eps = int(hf.linear_head_dim), float(hf.rms_norm_eps)
        own = HeadShare.of(heads, heads, build.ranks.tensor)
        groups = getattr(hf, "group_norm_size", None) or 1
        if groups < 1 or heads % groups or own.num_heads % (heads // groups):
            raise ConfigError(
                f"group_norm_size: {groups} groups of {heads} heads cannot be divided by "
                f"{build.ranks.tensor.size} ranks",
                param="tensor_parallel_size",
            )
        super().__init__(ssm=((own.num_heads, size, size), torch.float32))
        self.ranks, self.operations = build.ranks, build.operations
        self.layout = HeadLayout(own.num_heads, own.num_heads, size)
        self.group_size = heads // groups * size
        rows, width = own.rows(size), heads * size
        self.qkv_proj = MergedLinear(
            hf.hidden_size, dict.fromkeys(rows, width), build, shard="out", shares=rows, whole=True
        )
        self.q_norm = self.k_norm = None
        if getattr(hf, "use_qk_norm", False):
            self.q_norm, self.k_norm = (RMSNorm(size, self.eps, build) for _ in range(2))
        self.g_proj = Linear(hf.hidden_size, width, build, shard="out", share=rows["q"])
        self.g_norm = GroupsNorm(rows["q"], width, build)
        self.o_proj = Linear(width, hf.hidden_size, build, shard="in", share=rows["q"])
        last = max(1, config.num_layers - 1)
        rate = 1.0 - layer / last + 1e-5
        self.slopes = [slope * rate for slope in alibi_slopes(heads)[own.queries]]
        self.weights: ScanWeights
        self.steps: torch.Tensor
        """[1, num_heads]"""

    def after_loading(self) -> None:
        slopes = torch.tensor(self.slopes, device=self.g_norm.weight.device)
        zeros = torch.zeros_like(slopes)
        self.weights = ScanWeights(-slopes, zeros, zeros, dt_limit=(1.0, 1.0))
        self.steps = zeros[None]

    def forward(
        self,
        hidden: torch.Tensor,
        norm: nn.Module | None,
        rotary: Rotary,
        context: ForwardContext,
        *,
        add: bool = True,
    ) -> torch.Tensor:
        x = hidden if norm is None else norm(hidden)
        norms = [None if each is None else each.norm for each in (self.q_norm, self.k_norm)]
        query, key, value = self.operations.heads(
            self.qkv_proj(x), self.layout, context.positions, rotary.cos_sin, *norms
        )
        y = self.operations.ssd_scan(
            value, self.steps.expand(len(x), -1), key, query * self.layout.head_dim**-0.5,
            self.weights, self.state("ssm"), context.layout.state_rows,
        ).flatten(-2)  # fmt: skip
        y = self.operations.gated_rms_norm(
            y, self.g_proj(x), self.g_norm.weight, self.eps, group_size=self.group_size,
            gate_first=False, sigmoid=True,
        )  # fmt: skip
        return self.ranks.add(hidden if add else None, (self.o_proj, y))


def is_global(hf: Any, layer: int) -> bool:
    """Whether a layer has latent attention: the last one of each group, and the remaining ones."""
    group = hf.layer_group_size
    return bool((layer + 1) % group == 0 or layer >= hf.num_hidden_layers // group * group)


class LingLinearBlock(HybridBlock):
    state_name = "self_attn"

    @staticmethod
    def attends(hf: Any, layer: int) -> bool:
        return is_global(hf, layer)

    def make_mixer(self, parts: BlockParts, layer: int) -> nn.Module:
        return RotatedLightningAttention(parts.config, layer, parts.build)


class LingLinearDecoder(LatentDecoder):
    block = LingLinearBlock

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        """Lightning attention rotates a part of each head."""
        hf, rope = config.hf_config, config.rope_parameters
        check_sizes(hf)
        linear = Rotary(config, build, rope, head_dim=hf.linear_head_dim)
        whole = {**rope, "partial_rotary_factor": 1.0}
        latent = Rotary(config, build, whole, head_dim=hf.qk_rope_head_dim)
        return [latent if is_global(hf, n) else linear for n in range(config.num_layers)]


class BailingMoeV2_5ForCausalLM(BailingMoeForCausalLM):
    config_fields = LATENT | {"group_norm_size": INTEGER, "model_max_length": INTEGER}
    attention = NormedLatentAttention
    decoder = LingLinearDecoder
    weight_map = WeightMap(
        stacked=LATENT_MAP.stacked,
        tied=LATENT_MAP.tied,
        names=BailingMoeForCausalLM.weight_map.names,
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf = config.hf_config
        for field, served in (
            ("linear_silu", False), ("use_linear_silu", False), ("linear_rope", True)
        ):  # fmt: skip
            if (value := getattr(hf, field, served)) != served:
                raise ConfigError(f"{field}: {value} is not supported", param=field)
        super().__init__(config, build)
