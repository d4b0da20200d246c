"""Helium, Ernie 4.5 (dense) and GLM (first edition): Llama with pairs of neighbours rotated; and
PaddleOCR-VL's text part, which is Ernie's with halves rotated."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import RowOrder
from ...core.nn.context import BuildContext
from ...core.nn.mlp import GatedMLP
from .blocks import SelfAttention
from .decoder import CausalLM, Decoder
from .glm4 import Glm4Model


class HeliumAttention(SelfAttention):
    @staticmethod
    def output_bias(hf: object) -> bool:
        return False


class HeliumForCausalLM(CausalLM):
    attention: ClassVar[type[SelfAttention]] = HeliumAttention

    @staticmethod
    def row_orders(config: ModelConfig) -> dict[str, RowOrder]:
        order = RowOrder.halves(config.head_dim)
        return {"q_proj": order, "k_proj": order}


class ErnieAttention(SelfAttention):
    @staticmethod
    def qkv_bias(hf: Any) -> bool:
        return bool(hf.use_bias)

    output_bias = qkv_bias


class Ernie4_5ForCausalLM(HeliumForCausalLM):
    attention = ErnieAttention

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        return GatedMLP(
            hf.hidden_size, hf.intermediate_size, hf.hidden_act, build, bias=hf.use_bias
        )


class PaddleOCRTextForCausalLM(CausalLM):
    attention = ErnieAttention
    mlp = staticmethod(Ernie4_5ForCausalLM.mlp)


class GlmForCausalLM(Glm4Model, CausalLM):
    decoder = Decoder
