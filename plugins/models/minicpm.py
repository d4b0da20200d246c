"""MiniCPM: Llama with Granite's multipliers by other names; MiniCPM 3 with latent attention."""

from __future__ import annotations

from typing import ClassVar

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from .decoder import CausalLM, Decoder
from .granite import GraniteBlock
from .latent import LATENT, LATENT_MAP, LatentDecoder, LatentSelfAttention


class MiniCPMBlock(GraniteBlock):
    @staticmethod
    def multiplier_of(config: ModelConfig) -> float:
        return float(config.hf_config.scale_depth / config.num_layers**0.5)


class MiniCPMDecoder(Decoder):
    block = MiniCPMBlock

    @staticmethod
    def embedding_scale(config: ModelConfig, build: BuildContext) -> float:
        return float(config.hf_config.scale_emb)


class MiniCPMForCausalLM(CausalLM):
    decoder: ClassVar[type[Decoder]] = MiniCPMDecoder

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        if getattr(config.hf_config, "num_experts", 0):
            raise ConfigError("num_experts: experts are not supported here", param="num_experts")
        super().__init__(config, build)
        self.logits_factor = float(config.hf_config.dim_model_base) / config.hidden_size


class HalvesLatentAttention(LatentSelfAttention):
    @staticmethod
    def interleaved(hf: object) -> bool:
        return False


class MiniCPM3Decoder(MiniCPMDecoder):
    rotaries_of = staticmethod(LatentDecoder.rotaries_of)


class MiniCPM3ForCausalLM(MiniCPMForCausalLM):
    config_fields = LATENT
    decoder = MiniCPM3Decoder
    attention = HalvesLatentAttention
    weight_map = LATENT_MAP
