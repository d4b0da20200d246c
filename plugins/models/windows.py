"""Attention with windows or chunks in some layers, and with sinks."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.protocols.attention import AttentionSpec
from ...core.protocols.field_kinds import FLAG, INTEGER, FieldKind
from .blocks import SelfAttention

QWEN_WINDOWS: dict[str, FieldKind] = {"max_window_layers": INTEGER, "use_sliding_window": FLAG}
"""Fields from which `transformers` derives `layer_types`."""


def window_of_layer(hf: Any, layer: int) -> int | None:
    """Return the layer's window by `layer_types`, or the configuration's."""
    types = getattr(hf, "layer_types", None)
    if types and types[layer] == "sliding_attention":
        window: int | None = hf.sliding_window
        return window
    return None


class ChunkedAttention(SelfAttention):
    chunk_field: ClassVar[str] = "attention_chunk_size"
    """Field with the most tokens that a query sees: its chunk's and those of the chunks before
    it."""
    chunk_lookback: ClassVar[int] = 0

    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        """Return the spec, with chunks only if texts may be longer than a query sees, so that any
        backend serves other layers. Raises ConfigError without a size.
        """
        spec = super().spec(hf, layer)
        if hf.layer_types[layer] != "chunked_attention":
            return spec
        field, num_chunks = self.chunk_field, self.chunk_lookback + 1
        size = getattr(hf, field, None)
        if not size or size < num_chunks:
            raise ConfigError(
                f"{field}: {size} is no size of chunks, which layer_types has "
                f"(chunked_attention): set it to {num_chunks} or more",
                param=field,
            )
        chunk_size = size // num_chunks
        if chunk_size * num_chunks >= self.max_model_len:
            return spec
        return msgspec.structs.replace(
            spec, attention_chunk_size=chunk_size, chunk_lookback=self.chunk_lookback
        )


class WindowedAttention(SelfAttention):
    @staticmethod
    def sliding_window(hf: Any, layer: int) -> int | None:
        return window_of_layer(hf, layer)


class SinkAttention(WindowedAttention):
    """Adds a learned logit (sink) to the softmax of each head."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        self.add_sinks(build)

    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        return msgspec.structs.replace(super().spec(hf, layer), sinks=True)
