"""EXAONE 4: norms of heads, and after attention and MLP; with windows, only window layers
rotate.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.rotary import Rotary
from .decoder import CausalLM
from .olmo2 import Olmo2Decoder
from .qwen3 import Qwen3Attention


class Exaone4Decoder(Olmo2Decoder):
    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> Sequence[Rotary | None]:
        hf, rotary = config.hf_config, Rotary(config, build)
        everywhere = hf.sliding_window is None
        return [
            rotary if everywhere or kind == "sliding_attention" else None for kind in hf.layer_types
        ]


class Exaone4ForCausalLM(CausalLM):
    attention = Qwen3Attention
    decoder = Exaone4Decoder
