"""Rnj-1: Gemma 3 whose local layers attend to a key's own chunk and to the one before it."""

from __future__ import annotations

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.nn.rotary import Rotary
from .gemma3 import Gemma3Decoder, Gemma3ForCausalLM


class Rnj1Decoder(Gemma3Decoder):
    @staticmethod
    def rotaries_of(config: ModelConfig, build: BuildContext) -> list[Rotary]:
        """Layer types without rope parameters of their own have those of the layers with a
        window, as Gemma 3's local layers do."""
        hf = config.hf_config
        rope = {"chunked_attention": hf.rope_parameters["sliding_attention"], **hf.rope_parameters}
        rotaries = {kind: Rotary(config, build, rope[kind]) for kind in sorted(set(hf.layer_types))}
        return [rotaries[kind] for kind in hf.layer_types]


class Rnj1ForCausalLM(Gemma3ForCausalLM):
    """Of texts of up to two chunks, every token is in reach of all local layers: longer ones are
    refused. A chunk is `sliding_window` tokens."""

    tensor_parallel = True
    decoder = Rnj1Decoder

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        """Raises ConfigError for texts that reach beyond two chunks."""
        hf = config.hf_config
        reach = 2 * (hf.sliding_window or 0)
        if "chunked_attention" in hf.layer_types and config.max_model_len > reach:
            raise ConfigError(
                f"max_model_len: {config.max_model_len} is more than two chunks of sliding_window "
                f"{hf.sliding_window}, beyond which chunked_attention is not served; set it to "
                f"{reach}",
                param="max_model_len",
            )
        super().__init__(config, build)
