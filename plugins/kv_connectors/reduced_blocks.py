"""Blocks kept in fewer bits than the cache has: their size, and how they are copied."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

import torch

from ...core.cache.formats import QUANTIZED_FORMATS, QuantizedFormat
from ...core.errors import ConfigError
from ...core.nn.kv_cache.quantized_cache import dequantize, quantize
from ...core.protocols.kv import KVLayout
from .copying import BlockCopier

ReducedType = Literal["int8", "int8_int4", "int4"]
FLOATS = ("float32", "float16", "bfloat16")
WIDENED = 8
"""Most bytes of numbers in conversion per cached number."""


def reduced_bytes(layout: KVLayout, name: ReducedType) -> int:
    """Return a block's bytes in this format. Raises ConfigError without a float cache."""
    form, total = QUANTIZED_FORMATS[name], 0
    kinds_of_heads = {(part.shape[-1:], part.dtype) for parts in layout.layers for part in parts}
    if layout.bytes_elsewhere and len(kinds_of_heads) > 1:
        raise ConfigError(
            f"kv_connector_extra_config.kv_offloading_dtype: {name}: with several ranks, heads of "
            "all layers must be of one size and type",
            param="kv_transfer_config",
        )
    for parts in layout.layers:
        kinds = [(part.name, part.count, len(part.shape)) for part in parts]
        if kinds != [("kv", 2, 2)] or parts[0].dtype not in FLOATS:
            contents = ", ".join(f"{part.name} in {part.dtype}" for part in parts)
            raise ConfigError(
                f"kv_connector_extra_config.kv_offloading_dtype: {name} is for keys and values in "
                f"{', '.join(FLOATS)}; a layer of this model caches {contents}",
                param="kv_transfer_config",
            )
        heads, head_dim = parts[0].shape
        if (reason := form.refusal(head_dim)) is not None:
            raise ConfigError(
                f"kv_connector_extra_config.kv_offloading_dtype: {name}: {reason}",
                param="kv_transfer_config",
            )
        total += layout.block_size * heads * _head_bytes(form, head_dim)
    return total


def _head_bytes(form: QuantizedFormat, head_dim: int) -> int:
    """Return the bytes of a key and a value with scales and zeros."""
    return head_dim * (form.key_bits + form.value_bits) // 8 + 2 * 4


class ReducingCopier(BlockCopier):
    """A row has, per layer, codes of keys and values with scales and zeros, rounded as in
    `QuantizedFormat`.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor], name: ReducedType) -> None:
        """kv_caches: [num_layers] floats [2, num_blocks, block_size, num_kv_heads, head_dim]"""
        super().__init__(kv_caches)
        form = QUANTIZED_FORMATS[name]
        self._bits = form.key_bits, form.value_bits
        self._floats = list(kv_caches)
        self._bytes = [prod(c.shape[2:4]) * _head_bytes(form, c.shape[4]) for c in kv_caches]
        self.block_bytes, self._row_word = sum(self._bytes), torch.uint8
        self._chunk = max(1, self._chunk // WIDENED)

    def _gather(self, index: torch.Tensor) -> torch.Tensor:
        parts = [self._reduced(cache.index_select(1, index)) for cache in self._floats]
        return torch.cat(parts, dim=1)

    def _scatter(self, index: torch.Tensor, chunk: torch.Tensor) -> None:
        stored = torch.split(chunk, self._bytes, dim=1)
        for cache, part in zip(self._floats, stored, strict=True):
            cache.index_copy_(1, index, self._restored(part, cache))

    def _reduced(self, floats: torch.Tensor) -> torch.Tensor:
        """[2, n, block_size, num_kv_heads, head_dim] → [n, bytes] uint8"""
        pairs = [quantize(x, bits) for x, bits in zip(floats, self._bits, strict=True)]
        parts = [codes for codes, _ in pairs] + [words for _, words in pairs]
        return torch.cat([part.flatten(1).view(torch.uint8) for part in parts], dim=1)

    def _restored(self, stored: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """[n, bytes] uint8 → [2, n, block_size, num_kv_heads, head_dim] of the cache's type"""
        size, heads, head_dim = cache.shape[2:]
        widths = [head_dim * bits // 8 for bits in self._bits]
        codes_and_words = torch.split(stored, [size * heads * n for n in (*widths, 4, 4)], dim=1)
        sides = []
        for side, (width, bits) in enumerate(zip(widths, self._bits, strict=True)):
            kind = torch.int8 if bits == 8 else torch.uint8
            codes = codes_and_words[side].contiguous().view(kind)
            words = codes_and_words[2 + side].contiguous().view(torch.int32)
            shape = (-1, size, heads)
            sides.append(dequantize(codes.view(*shape, width), words.view(shape)))
        return torch.stack(sides).to(cache.dtype)
