"""How each layer's keys and values are stored, by `EngineConfig.kv_cache_dtype`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from ...cache.formats import QUANTIZED_FORMATS, SYNONYMS, QuantizedFormat
from ...config import EngineConfig
from ...errors import ConfigError
from ...nn.attention import Attention

KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
QUANTIZED_WRITES = frozenset({"cached_heads.quantized", "write_cache.quantized"})
"""Features of `Operations` that write quantized caches."""
LOCAL = "sliding_window"
"""Word in `EngineConfig.kv_cache_dtype_skip_layers` for layers with a window or chunks."""


class CacheFormats(NamedTuple):
    """What the layers' caches require of backends."""

    dtype: torch.dtype
    """Type of layers without their own format."""
    fp8_layers: tuple[Attention, ...]
    quantized: str | None
    """The layers' quantized format."""

    @property
    def fp8_cache(self) -> bool:
        return bool(self.fp8_layers)


def choose_formats(
    layers: Sequence[Attention],
    config: EngineConfig,
    checkpoint_dtype: str | None,
    dtype: torch.dtype,
) -> CacheFormats:
    """Set each layer's `cache_format`, and fp8 scales.

    checkpoint_dtype: meaning of "auto"; dtype: the model's. Raises ConfigError for an impossible
    type.
    """
    name: str = config.kv_cache_dtype
    if name == "auto" and checkpoint_dtype is not None:
        name = checkpoint_dtype
    name = SYNONYMS.get(name, name)
    form: QuantizedFormat | torch.dtype = QUANTIZED_FORMATS.get(name) or KV_DTYPES.get(name, dtype)
    narrow = isinstance(form, QuantizedFormat) or form.itemsize == 1
    if not narrow and form != dtype:
        raise ConfigError(
            f"kv_cache_dtype: {config.kv_cache_dtype} differs from the model's {dtype}, which is "
            "not supported",
            param="kv_cache_dtype",
        )
    skipped = _skipped(layers, config.kv_cache_dtype_skip_layers)
    if skipped and not narrow:
        raise ConfigError(
            f"kv_cache_dtype_skip_layers: all layers cache in the model's type already, for "
            f"kv_cache_dtype is {config.kv_cache_dtype}",
            param="kv_cache_dtype_skip_layers",
        )
    stored = [layer for number, layer in enumerate(layers) if number not in skipped]
    for number in skipped:
        layers[number].cache_format = dtype
    for layer in stored:
        layer.cache_format = form
    if isinstance(form, QuantizedFormat):
        for layer in stored:
            if (reason := form.refusal(layer.spec.head_dim)) is not None:
                raise ConfigError(
                    f"kv_cache_dtype: {name} does not serve this model: {reason}",
                    param="kv_cache_dtype",
                )
        return CacheFormats(dtype, (), form.name if stored else None)
    if not narrow:
        return CacheFormats(dtype, (), None)
    for layer in stored:
        key_scale, value_scale = layer.cache_scales
        layer.spec = msgspec.structs.replace(
            layer.spec, key_scale=key_scale, value_scale=value_scale
        )
    return CacheFormats(form, tuple(stored), None)


def _skipped(layers: Sequence[Attention], words: Sequence[str]) -> set[int]:
    """Return the layers that keep the model's type."""
    skipped: set[int] = set()
    for word in words:
        if word == LOCAL:
            numbers = [n for n, layer in enumerate(layers) if layer.spec.reach is not None]
        else:
            try:
                numbers = [range(len(layers))[int(word)]]
            except (ValueError, IndexError):
                numbers = []
        if not numbers:
            raise ConfigError(
                f"kv_cache_dtype_skip_layers: {word!r} names no layer: the model has "
                f"{len(layers)} with attention, counted from 0, and {LOCAL} means those with a "
                "window or chunks",
                param="kv_cache_dtype_skip_layers",
            )
        skipped.update(numbers)
    return skipped
