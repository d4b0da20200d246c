"""Keys and values stored as small integers: how they are written and read, in plain torch.

Each token has, for each KV head, a scale and a zero of its own, both bfloat16: a number is
zero + scale * code with 8 bits, zero + scale * (code - 7.5) with 4. The zero is the middle of the
head's channels, the scale such that the codes reach the smallest and the largest of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch

STEPS = {8: 127.0, 4: 7.5}
"""Bits → steps from the middle to the largest code."""
MIDDLE = {8: 0.0, 4: 7.5}
"""Bits → the code of the middle."""
SMALLEST_SCALE = 1e-30
"""Below, all codes are those of the middle: the reciprocal would overflow."""
UPPER = -(1 << 16)
"""Mask of an int32's upper half."""


class QuantizedCache(NamedTuple):
    """One layer's cache: [num_blocks, block_size, num_kv_heads, width] codes, with a width of
    head_dim and int8 for 8 bits; head_dim / 2 and uint8 for 4 bits, where byte i has channel i in
    its low half and channel i + head_dim / 2 in its high half."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor
    """[2 (of keys, of values), num_blocks, num_kv_heads, block_size] int32: a scale in the low half
    and a zero in the high half, both bfloat16. Tokens of a block are adjacent, so that a kernel
    reads those of one head at once."""

    @classmethod
    def of(cls, parts: Mapping[str, torch.Tensor]) -> QuantizedCache:
        """Return the cache made of the parts of a `QuantizedFormat`."""
        keys, values = parts["kv"] if "kv" in parts else (parts["key"][0], parts["value"][0])
        words = parts["scales"]
        count, num_blocks, block_size, num_kv_heads = words.shape
        return cls(keys, values, words.view(count, num_blocks, num_kv_heads, block_size))


KVCache: TypeAlias = torch.Tensor | QuantizedCache
"""[2 (key, value), num_blocks, block_size, num_kv_heads, head_dim], floats; or quantized."""


def code_bits(codes: torch.Tensor) -> int:
    """Return the bits of each code."""
    return 8 if codes.dtype == torch.int8 else 4


def quantize(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [..., head_dim] → codes as a cache has them, [..., width], and words of scale and zero,
    [...] int32."""
    wide = x.float()
    lowest, highest = wide.amin(-1), wide.amax(-1)
    zero = _nearest_bfloat16((lowest + highest) * 0.5)
    reach = torch.maximum(highest - zero, zero - lowest)
    scale = _next_bfloat16(reach * (1.0 / STEPS[bits]))
    inverse = torch.where(scale > SMALLEST_SCALE, 1.0 / scale, 0.0)
    codes = (wide - zero[..., None]) * inverse[..., None] + (MIDDLE[bits] + 0.5)
    least = MIDDLE[bits] - STEPS[bits]
    codes = codes.floor().clamp(least, MIDDLE[bits] + STEPS[bits]).to(torch.int32)
    words = (zero.view(torch.int32) & UPPER) | (scale.view(torch.int32) >> 16)
    if bits == 8:
        return codes.to(torch.int8), words
    low, high = codes.chunk(2, dim=-1)
    return (low | high << 4).to(torch.uint8), words


def dequantize(codes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """codes: [..., width] as a cache has them; words: [...] int32 → [..., head_dim] float32"""
    scale = (words << 16).view(torch.float32)[..., None]
    zero = (words & UPPER).view(torch.float32)[..., None]
    if code_bits(codes) == 8:
        return zero + scale * codes.float()
    channels = torch.cat((codes & 15, codes >> 4), dim=-1)
    return zero + scale * (channels.float() - MIDDLE[4])


def write_blocks(
    key: torch.Tensor, value: torch.Tensor, cache: QuantizedCache, slot_mapping: torch.Tensor
) -> None:
    """Write keys and values, [T, num_kv_heads, head_dim] each, at slot_mapping, [T] int64."""
    write_part(key, cache.keys, cache.scales[0], slot_mapping)
    write_part(value, cache.values, cache.scales[1], slot_mapping)


def write_part(
    x: torch.Tensor, codes: torch.Tensor, words: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write keys alone, or values. codes, words: of all blocks, as `QuantizedCache` has them"""
    new_codes, new_words = quantize(x, code_bits(codes))
    codes.flatten(0, 1).index_copy_(0, slot_mapping, new_codes)
    size = words.shape[2]
    words[slot_mapping // size, :, slot_mapping % size] = new_words


def read_keys(
    cache: KVCache, blocks: torch.Tensor, dtype: torch.dtype, scale: float
) -> torch.Tensor:
    """Return the keys of N blocks, [N, block_size, num_kv_heads, head_dim].

    blocks: [N] int; dtype: of what an fp8 or quantized cache is converted to; scale: what an fp8
    cache is multiplied by.
    """
    if isinstance(cache, QuantizedCache):
        return _read_codes(cache.keys, cache.scales[0], blocks, dtype)
    return _read_floats(cache[0], blocks, dtype, scale)


def read_values(
    cache: KVCache, blocks: torch.Tensor, dtype: torch.dtype, scale: float
) -> torch.Tensor:
    """As `read_keys`."""
    if isinstance(cache, QuantizedCache):
        return _read_codes(cache.values, cache.scales[1], blocks, dtype)
    return _read_floats(cache[1], blocks, dtype, scale)


def _read_codes(
    codes: torch.Tensor, words: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    own = words.index_select(0, blocks).transpose(1, 2).contiguous()
    return dequantize(codes.index_select(0, blocks), own).to(dtype)


def _read_floats(
    part: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype, scale: float
) -> torch.Tensor:
    if part.dtype.itemsize > 1:
        return part.index_select(0, blocks)
    # Bytes: torch gathers no fp8.
    gathered = part.view(torch.uint8).index_select(0, blocks).view(part.dtype)
    return gathered.to(dtype) * scale


def token_parts(cache: KVCache) -> dict[str, torch.Tensor]:
    """Return views of all that a layer keeps of each token and head, to be moved as it is: each
    [count, num_blocks, block_size, num_kv_heads, width], with any strides."""
    if isinstance(cache, QuantizedCache):
        words = cache.scales.transpose(2, 3)[..., None]
        return {"keys": cache.keys[None], "values": cache.values[None], "scales": words}
    # Bytes: torch moves no fp8.
    return {"kv": cache if cache.dtype.itemsize > 1 else cache.view(torch.uint8)}


def write_values(
    value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor, scale: float
) -> None:
    """Replace values alone. value: [T, num_kv_heads, head_dim]; slot_mapping: [T] int64; scale:
    what an fp8 cache is multiplied by"""
    if isinstance(cache, QuantizedCache):
        write_part(value, cache.values, cache.scales[1], slot_mapping)
        return
    values = cache[1]
    if cache.dtype.itemsize == 1:
        largest = torch.finfo(cache.dtype).max
        value = (value.float() / scale).clamp_(-largest, largest).to(cache.dtype).view(torch.uint8)
        values = values.view(torch.uint8)
    values.flatten(0, 1).index_copy_(0, slot_mapping, value.to(values.dtype))


def _nearest_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()


def _next_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Return the least bfloat16 ≥ x; x: float32, not negative."""
    return ((x.view(torch.int32) + 0xFFFF) & UPPER).view(torch.float32)
