"""StableLM: layer norms with a bias, a quarter of each head rotated, blocks serial or parallel.

Source: the `StableLmForCausalLM` of `transformers`, and https://huggingface.co/stabilityai.
"""

from __future__ import annotations

from typing import Any

from jackfield.core.errors import ConfigError
from jackfield.core.loading.model_config import ModelConfig
from jackfield.core.nn.context import BuildContext
from jackfield.core.nn.norm import LayerNorm
from jackfield.core.protocols.field_kinds import FLAG
from jackfield.plugins.models.decoder import (
    Block,
    CausalLM,
    Decoder,
    ParallelBlock,
    SelfAttention,
)


class StableLmAttention(SelfAttention):
    """The rotation's share of a head is `Rotary`'s business."""

    @staticmethod
    def qkv_bias(hf: Any) -> bool:
        return bool(hf.use_qkv_bias)

    @staticmethod
    def output_bias(hf: object) -> bool:
        return False


class SerialStableLmBlock(Block):
    norm = LayerNorm


class ParallelStableLmBlock(ParallelBlock):
    norm = LayerNorm


class StableLmDecoder(Decoder):
    @classmethod
    def block_of(cls, config: ModelConfig) -> type[Block]:
        """Attention and MLP, one after the other, or side by side over one norm."""
        parallel = config.hf_config.use_parallel_residual
        return ParallelStableLmBlock if parallel else SerialStableLmBlock


class StableLmForCausalLM(CausalLM):
    attention = StableLmAttention
    decoder = StableLmDecoder
    config_fields = {"qk_layernorm": FLAG, "use_parallel_residual": FLAG, "use_qkv_bias": FLAG}

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """Raises ConfigError for the variant that is not done here."""
        if config.hf_config.qk_layernorm:
            raise ConfigError("qk_layernorm: norms of each head are not done", param="qk_layernorm")
        super().__init__(config, build)
