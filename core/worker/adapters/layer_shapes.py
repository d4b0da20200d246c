"""Shapes of layers that adapters change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...nn.quantized import QuantizedEmbedding, QuantizedLinear
from ...parallel.sharding import Sharding


def is_head(layer: Any) -> bool:
    """Whether a quantized layer is a head."""
    spec = getattr(layer, "spec", None)
    return spec is not None and spec.role in ("head", "embedding")


def of_experts(layer: Any) -> bool:
    spec = getattr(layer, "spec", None)
    return spec is not None and spec.role == "experts"


def sharding_of(layer: Any) -> Sharding | None:
    """Return what this rank has of a layer's weight; None: all."""
    if isinstance(layer, QuantizedLinear):
        return layer.sharding
    sharding: Sharding | None = getattr(layer, "shardings", {}).get("weight")
    return sharding


def out_features(layer: Any) -> int:
    """Return the rows of a layer's weight on this rank."""
    if isinstance(layer, QuantizedLinear):
        return layer.spec.out_features
    return int(layer.weight.shape[0])


def in_features(layer: Any) -> int:
    """Return the columns of a layer's weight on this rank."""
    if isinstance(layer, QuantizedLinear):
        return layer.spec.in_features
    return int(layer.weight.shape[1])


def part_bounds(layer: Any) -> tuple[int, ...]:
    """Return where the parts of a layer's output features begin, and the end."""
    shards: Sequence[slice] = list((getattr(layer, "shards", None) or {}).values())
    if not shards:
        return 0, out_features(layer)
    return (*(each.start for each in shards), shards[-1].stop)


def vocabulary_of(layer: Any) -> tuple[int, int]:
    if isinstance(layer, QuantizedEmbedding):
        layer = layer.layer
    if isinstance(layer, QuantizedLinear):
        return layer.spec.out_features, layer.spec.in_features
    return layer.vocab_size, int(layer.weight.shape[1])
