"""Attention with a window in some of the layers, and with sinks."""

from __future__ import annotations

from typing import Any

import msgspec

from ...core.loading.model_config import ModelConfig
from ...core.nn.context import BuildContext
from ...core.protocols.attention import AttentionSpec
from ...core.protocols.field_kinds import FLAG, INTEGER, FieldKind
from .decoder import SelfAttention

QWEN_WINDOWS: dict[str, FieldKind] = {"max_window_layers": INTEGER, "use_sliding_window": FLAG}
"""Fields of config.json from which `transformers` makes `layer_types`."""


def window_of_layer(hf: Any, layer: int) -> int | None:
    """Return the window by `layer_types` if the configuration has them (as `transformers` fills
    them in)."""
    types = getattr(hf, "layer_types", None)
    if types and types[layer] == "sliding_attention":
        window: int | None = hf.sliding_window
        return window
    return None


class WindowedAttention(SelfAttention):
    """Attends within a window where `layer_types` says so."""

    @staticmethod
    def sliding_window(hf: Any, layer: int) -> int | None:
        return window_of_layer(hf, layer)


class SinkAttention(WindowedAttention):
    """Adds a learned logit (sink) to the softmax of each head."""

    def __init__(self, config: ModelConfig, layer: int, build: BuildContext) -> None:
        super().__init__(config, layer, build)
        self.add_sinks(build)

    def spec(self, hf: Any, layer: int) -> AttentionSpec:
        """Return the spec, with sinks."""
        return msgspec.structs.replace(super().spec(hf, layer), sinks=True)
