"""Formats of a KV cache with fewer bits than a float, as data."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .groups import CachePart


class QuantizedFormat(msgspec.Struct, frozen=True):
    """Small integers with a scale and a zero per token and head."""

    name: str
    """Name in `EngineConfig.kv_cache_dtype`."""
    key_bits: int
    """Per channel: 8 or 4."""
    value_bits: int
    """Per channel: 8 or 4."""

    def parts(self, num_kv_heads: int, head_dim: int) -> tuple[CachePart, ...]:
        """Return a layer's cache parts (`QuantizedCache`)."""
        bits = (self.key_bits, self.value_bits)
        key, value = (
            ((num_kv_heads, head_dim * width // 8), "int8" if width == 8 else "uint8")
            for width in bits
        )
        scales = CachePart("scales", (num_kv_heads,), "int32", count=2)
        if key == value:
            return CachePart("kv", *key, count=2), scales
        return CachePart("key", *key), CachePart("value", *value), scales

    def refusal(self, head_dim: int) -> str | None:
        """Return why this head size is unsupported, or None."""
        if min(self.key_bits, self.value_bits) == 4 and head_dim % 2:
            return f"two channels share a byte, and a head has {head_dim}"
        return None


QUANTIZED_FORMATS: Mapping[str, QuantizedFormat] = {
    form.name: form
    for form in (
        QuantizedFormat("int8", 8, 8),
        QuantizedFormat("int8_int4", 8, 4),
        QuantizedFormat("int4", 4, 4),
    )
}
SYNONYMS = {"int8_per_token_head": "int8"}
"""vLLM's names → ours."""
