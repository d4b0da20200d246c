"""Phi-3, Phi-3.5 and Phi-4: Llama with queries, keys and values in one checkpoint tensor."""

from __future__ import annotations

from torch import nn

from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import WeightMap
from ...core.nn.context import BuildContext
from ...core.nn.mlp import GatedMLP
from .decoder import CausalLM, DecoderClassifier, HeadlessLM
from .mistral import MistralAttention


class Phi3Attention(MistralAttention):
    """The fused checkpoint tensor already has this row order."""

    fused = True

    @staticmethod
    def qkv_bias(hf: object) -> bool:
        return False


class Phi3Model(HeadlessLM):
    """Merges nothing on loading: a quantized layer has scales of the whole tensor."""

    attention = Phi3Attention
    weight_map = WeightMap(tied=HeadlessLM.weight_map.tied, prefixes=HeadlessLM.weight_map.prefixes)

    @staticmethod
    def mlp(config: ModelConfig, layer: int, build: BuildContext) -> nn.Module:
        hf = config.hf_config
        return GatedMLP(hf.hidden_size, hf.intermediate_size, hf.hidden_act, build, whole=True)


class Phi3ForCausalLM(Phi3Model, CausalLM):
    pass


class AdaptedWeights(WeightMap):
    """Of layers that adapters were wrapped around. Those are not read: requests choose adapters."""

    def own(self, name: str) -> str | None:
        if ".lora_A." in name or ".lora_B." in name:
            return None
        return super().own(name.replace(".base_layer.", "."))


class Phi4MMTextForCausalLM(Phi3ForCausalLM):
    """The text part of Phi-4-multimodal, as it was published."""

    weight_map = AdaptedWeights(
        tied=Phi3Model.weight_map.tied, prefixes=Phi3Model.weight_map.prefixes
    )


class Phi3ForSequenceClassification(Phi3Model, DecoderClassifier):
    pass
