"""Kimi Linear and Ling 3: Kimi delta attention in most layers, latent attention in some, and
DeepSeek's mixtures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard, WeightMap
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.experts import SparseMLP
from ...core.nn.linear import MergedLinear
from ...core.nn.mlp import GatedMLP
from ...core.nn.rotary import Rotary
from ...core.nn.state.channel_delta import PARTS, KimiDeltaAttention
from ...core.protocols.field_kinds import INTEGER
from .blocks import BlockParts, SelfAttention
from .decoder import CausalLM, Decoder
from .deepseek_moe import DeepseekMoeForCausalLM, is_dense
from .latent import LATENT, LATENT_MAP, LatentDecoder, LatentSelfAttention, check_sizes
from .mixer import HybridBlock


class KimiBlock(HybridBlock):
    state_name = "self_attn"

    def make_mixer(self, parts: BlockParts, layer: int) -> nn.Module:
        hf = parts.config.hf_config
        return KimiDeltaAttention(
            hf.hidden_size, hf.linear_num_heads, hf.linear_head_dim, hf.linear_conv_kernel_dim,
            parts.build, eps=float(hf.rms_norm_eps), rank=hf.linear_head_dim,
        )  # fmt: skip


class KimiDecoder(LatentDecoder):
    block = KimiBlock

    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        check_sizes(config.hf_config)
        return [None] * config.num_layers


class KimiWeightMap(WeightMap):
    """Rates of decay are stored as [1, 1, num_heads, 1]; experts may be named differently."""

    def pieces(
        self, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, str | None, torch.Tensor]]:
        yield from super().pieces(name, tensor.flatten() if name.endswith(".A_log") else tensor)

    def source(self, parameter: str, shard: str | None = None) -> str:
        name = super().source(parameter, shard)
        if "w1" in self.stacked and ".experts." in name:
            return name.replace(".gate_proj.", ".w1.").replace(".up_proj.", ".w3.")
        return name


DELTA = {
    **{f"{part}_proj": Shard("down_proj", part) for part in PARTS},
    **{f"{part}_conv1d": Shard("conv1d", part) for part in PARTS},
    "b_proj": Shard("gates_proj", "b"),
}


class KimiLinearForCausalLM(DeepseekMoeForCausalLM):
    config_fields = LATENT | {"model_max_length": INTEGER}
    attention: ClassVar[type[SelfAttention]] = LatentSelfAttention
    decoder: ClassVar[type[Decoder]] = KimiDecoder
    weight_map = KimiWeightMap(
        stacked={
            **LATENT_MAP.stacked, **DELTA,
            "f_a_proj": Shard("gates_proj", "f"),
            "g_a_proj": Shard("gates_proj", "g"),
            "w1": Shard("gate_up_proj", "gate"),
            "w2": Shard("down_proj", ""),
            "w3": Shard("gate_up_proj", "up"),
        },
        tied=CausalLM.weight_map.tied,
        prefixes=CausalLM.weight_map.prefixes,
        names={"mlp": "block_sparse_moe"},
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        if getattr(config.hf_config, "mla_use_nope", True) is not True:
            raise ConfigError("mla_use_nope: only true is supported", param="mla_use_nope")
        super().__init__(config, build)

    @classmethod
    def mlp(cls, config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf: Any = config.hf_config
        if is_dense(hf, layer):
            return CausalLM.mlp(config, layer, build)
        size, inner, shared = hf.hidden_size, hf.moe_intermediate_size, hf.n_shared_experts or 0
        return SparseMLP(
            hf.num_local_experts, cls.rule(hf), size, inner, hf.hidden_act, build,
            score_bias=True, wide_router=True,
            shared=GatedMLP(size, shared * inner, hf.hidden_act, build) if shared else None,
        )  # fmt: skip


class GatedLatentAttention(LatentSelfAttention):
    """Each head's output times the sigmoid of a number."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        self.gates_proj = MergedLinear(
            config.hidden_size, {"g": config.num_heads}, build, shard="out",
            shares={"g": self.own.queries},
        )  # fmt: skip

    def inner(
        self,
        hidden: torch.Tensor,
        norm: nn.Module | None,
        rotary: Rotary | None,
        context: ForwardContext,
    ) -> torch.Tensor:
        x = hidden if norm is None else norm(hidden)
        heads = super().inner(x, None, rotary, context)
        gate = torch.sigmoid(self.gates_proj(x).float()).to(heads.dtype)
        return (heads.view(*gate.shape, -1) * gate[:, :, None]).flatten(-2)


class BailingHybridBlock(KimiBlock):
    def make_mixer(self, parts: BlockParts, layer: int) -> nn.Module:
        hf = parts.config.hf_config
        return KimiDeltaAttention(
            hf.hidden_size, hf.linear_num_heads, hf.linear_head_dim, hf.linear_conv_kernel_dim,
            parts.build, eps=float(hf.rms_norm_eps), rank=None,
            bound=float(hf.kda_lower_bound) if hf.kda_safe_gate else None,
        )  # fmt: skip


class BailingHybridDecoder(LatentDecoder):
    block = BailingHybridBlock


class BailingHybridForCausalLM(KimiLinearForCausalLM):
    """Full-width decay and gate projections; latent attention has a gate per head."""

    attention = GatedLatentAttention
    decoder = BailingHybridDecoder
    weight_map = KimiWeightMap(
        stacked={
            **LATENT_MAP.stacked, **DELTA,
            "f_proj": Shard("gates_proj", "f"),
            "g_proj": Shard("gates_proj", "g"),
        },
        names={
            "model.embed_tokens": "model.word_embeddings", "self_attn": "attention",
            "o_proj": "dense", "gate.e_score_correction_bias": "gate.expert_bias",
        },
    )  # fmt: skip
