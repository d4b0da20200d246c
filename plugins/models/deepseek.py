"""DeepSeek V2, V3 (R1, Kimi K2) and V3.2, GLM-4.7 Flash, GLM-5, Sarvam 105B, Youtu and A.X K1:
latent attention, in most of them beside mixtures of experts."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext, ForwardContext
from ...core.nn.experts import SparseMLP
from ...core.nn.rotary import Rotary
from ...core.nn.routing import RoutingRule
from .blocks import Block, BlockParts
from .decoder import CausalLM, Decoder
from .deepseek_moe import DeepseekMoeForCausalLM, is_dense
from .indexed import INDEXED, IndexedDecoder, IndexedSelfAttention, chooses, has_indexer
from .latent import LATENT, LATENT_MAP, LatentDecoder, LatentSelfAttention

V2_METHODS = {"greedy": False, "group_limited_greedy": True}
"""How V2 chooses experts → whether only in the best groups."""


class DeepseekV3ForCausalLM(DeepseekMoeForCausalLM):
    config_fields = LATENT
    attention = LatentSelfAttention
    decoder: ClassVar[type[Decoder]] = LatentDecoder
    weight_map = LATENT_MAP


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    pass


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """V3 with indexers, which choose the `index_topk` tokens that attention reads. They are not
    loaded if no text may be longer than that.
    """

    config_fields = INDEXED
    attention = IndexedSelfAttention
    decoder = IndexedDecoder

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        hf = config.hf_config
        unused = (
            f"model.layers.{layer}.self_attn.indexer."
            for layer in range(config.num_layers)
            if not (chooses(config) and has_indexer(hf, layer))
        )
        ignored = (*self.weight_map.ignored, *unused)
        self.weight_map = dataclasses.replace(self.weight_map, ignored=ignored)


class GlmIndexedSelfAttention(IndexedSelfAttention):
    index_interleaved = True


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """GLM-5, some of whose layers share the choice of an earlier one's indexer."""

    attention = GlmIndexedSelfAttention


class SarvamMLAForCausalLM(DeepseekV3ForCausalLM):
    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        hf = config.hf_config
        for field, served in (
            ("score_function", "sigmoid"),
            ("moe_router_enable_expert_bias", True),
        ):
            if getattr(hf, field) != served:
                raise ConfigError(f"{field}: {getattr(hf, field)!r} is not supported", param=field)
        super().__init__(config, build)


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    """Experts are chosen by softmax, without a bias."""

    @staticmethod
    def score_bias(hf: Any) -> bool:
        return False

    @staticmethod
    def rule(hf: object) -> RoutingRule:
        method = getattr(hf, "topk_method", None) or "greedy"
        if method not in V2_METHODS:
            raise ConfigError(
                f"topk_method: {method!r} is not supported (there are: {', '.join(V2_METHODS)})",
                param="topk_method",
            )
        if getattr(hf, "norm_topk_prob", False):
            raise ConfigError(
                "norm_topk_prob: weights that sum to 1 are not supported for this architecture",
                param="norm_topk_prob",
            )
        rule = DeepseekMoeForCausalLM.rule(hf)._replace(scoring="softmax")
        return rule if V2_METHODS[method] else rule._replace(groups=1, top_groups=1)


class YoutuForCausalLM(CausalLM):
    config_fields = LATENT
    attention = LatentSelfAttention
    decoder = LatentDecoder
    weight_map = LATENT_MAP


class AXK1Block(Block):
    """Norms what a mixture adds."""

    mlp: SparseMLP

    def __init__(self, parts: BlockParts, layer: int) -> None:
        super().__init__(parts, layer)
        config = parts.config
        dense = is_dense(config.hf_config, layer)
        self.post_mlp_layernorm = None if dense else self.make_norm(config.hf_config, parts.build)

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary | None, context: ForwardContext
    ) -> torch.Tensor:
        norm: Any = self.post_mlp_layernorm
        if norm is None:
            return super().forward(hidden, rotary, context)
        hidden = self.self_attn(hidden, self.input_layernorm, rotary, context)
        out: torch.Tensor = norm.add(
            self.mlp(hidden, self.post_attention_layernorm, add=False), hidden
        )
        return out


class AXK1Decoder(LatentDecoder):
    block = AXK1Block


class AXK1ForCausalLM(DeepseekV3ForCausalLM):
    """V3 with a norm of a mixture's output; checkpoints have one for other layers, too."""

    decoder = AXK1Decoder

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        layers = (n for n in range(config.num_layers) if is_dense(config.hf_config, n))
        unused = tuple(f"model.layers.{layer}.post_mlp_layernorm." for layer in layers)
        ignored = (*self.weight_map.ignored, *unused)
        self.weight_map = dataclasses.replace(self.weight_map, ignored=ignored)
