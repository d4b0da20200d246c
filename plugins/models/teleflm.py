"""Tele-FLM: Llama with muP multipliers of embeddings and logits."""

from __future__ import annotations

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from .decoder import CausalLM, Decoder


class TeleFLMDecoder(Decoder):
    @staticmethod
    def embedding_scale(config: ModelConfig, build: BuildContext) -> float | None:
        hf = config.hf_config
        return float(hf.input_mult) if hf.use_mup else None


class TeleFLMForCausalLM(CausalLM):
    decoder = TeleFLMDecoder

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        hf = config.hf_config
        self.logits_factor = hf.output_mult / hf.mup_scale_factor if hf.use_mup else 1.0
