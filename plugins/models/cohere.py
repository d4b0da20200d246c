"""Cohere 1 (Command R) and 2 (Command R7B, Command A): attention and MLP side by side over one norm
without biases, pairs of neighbours rotated, scaled logits. 2 rotates only in layers with a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder
from ...core.nn.context import BuildContext
from ...core.nn.norm import BiaslessLayerNorm
from ...core.nn.rotary import Rotary
from .blocks import ParallelBlock, SelfAttention
from .decoder import CausalLM, Decoder, HeadlessLM
from .parts import HeadNormAttention, HeadsLayerNorm
from .windows import WindowedAttention


class CohereAttention(HeadNormAttention):
    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        hf = config.hf_config
        if hf.use_qk_norm:
            order = RowOrder.halves(self.head_dim)
            queries = config.num_heads, self.head_dim, self.own.queries
            keys = self.kv_heads(config), self.head_dim, self.own.keys
            self.q_norm, self.k_norm = None, None
            self.q_layernorm = HeadsLayerNorm(*queries, hf.layer_norm_eps, build, order)
            self.k_layernorm = HeadsLayerNorm(*keys, hf.layer_norm_eps, build, order)


class CohereBlock(ParallelBlock):
    norm = BiaslessLayerNorm


class CohereDecoder(Decoder):
    block = CohereBlock


class CohereForCausalLM(CausalLM):
    attention: ClassVar[type[SelfAttention]] = CohereAttention
    decoder = CohereDecoder
    weight_map = replace(
        HeadlessLM.weight_map, names={"q_layernorm": "q_norm", "k_layernorm": "k_norm"}
    )

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.logits_factor = float(config.hf_config.logit_scale)

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        order = RowOrder.halves(config.head_dim)
        return {"q_proj": order, "k_proj": order}


class Cohere2Decoder(CohereDecoder):
    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        rotary = Rotary(config, build)
        types = config.hf_config.layer_types
        return [rotary if kind == "sliding_attention" else None for kind in types]


class Cohere2ForCausalLM(CohereForCausalLM):
    attention = WindowedAttention
    decoder = Cohere2Decoder
