"""How kernels that score cached tokens read them: in place, block by block, all layers in one
launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..attention.quantized_tiles import Quantized, cache_arguments, word_scale, word_zero
from .caches import addresses_of, cache_of_layer


class CachedTokens(NamedTuple):
    """One request's tokens in the caches of several layers of one shape."""

    caches: Sequence[torch.Tensor | Quantized]
    """[L] of [2, num_blocks, block_size, num_kv_heads, head_dim] floats, or quantized; all of one
    shape, strides and type; the last stride is 1."""
    blocks: torch.Tensor
    """[columns] int32"""
    num_tokens: int
    head_dim: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.caches), cache_arguments(self.caches[0]).num_kv_heads, self.num_tokens

    def launch_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what every kernel takes: arguments, in their order, and constants."""
        layers = [cache_arguments(cache) for cache in self.caches]
        first = layers[0]
        parts = [[layer.keys for layer in layers], [layer.values for layer in layers]]
        if isinstance(self.caches[0], tuple):
            parts += [[cache[2][kind] for cache in self.caches] for kind in (0, 1)]
        addresses, aligned = addresses_of([part for kind in parts for part in kind])
        arguments = (
            addresses, first.keys, first.values, self.blocks, self.num_tokens,
            *first.keys.stride()[:3], *first.values.stride()[:3],
        )  # fmt: skip
        constants = {
            "NUM_KV_HEADS": first.num_kv_heads,
            "HEAD_DIM": self.head_dim,
            "BLOCK_SIZE": first.block_size,
            "BLOCK_D": max(16, triton.next_power_of_2(self.head_dim)),
            "KEY_BITS": first.key_bits,
            "VALUE_BITS": first.value_bits,
            "ALIGNED": aligned,
        }
        return arguments, constants


@triton.jit
def head_pointers(
    addresses_ptr, like_ptr, layer, head, stride_head,
    BITS: tl.constexpr, ALIGNED: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Return where a head's keys of a layer begin, or its values, and the words of all heads.

    addresses_ptr: [2 or 4 (keys, values, words of both), L] int64; like_ptr: of the type that is
    cached; BITS: as of `CacheArguments`; words of floats are nothing of use
    """
    kind = addresses_ptr + (1 if VALUES else 0) * tl.num_programs(2)
    cache = cache_of_layer(kind, layer, like_ptr, ALIGNED) + head * stride_head
    words = cache
    if BITS < 16:
        words = tl.load(kind + 2 * tl.num_programs(2) + layer).to(tl.pointer_type(tl.int32))
    return cache, words


@triton.jit
def token_tile(
    cache, words, blocks_ptr, head, place, num_tokens, stride_block, stride_slot,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Return a head's keys, or its values, at these places: [N, BLOCK_D], 0 where there are none;
    quantized ones as float32. cache, words: `head_pointers`; place: [N]; BITS: 4 only for a
    HEAD_DIM of BLOCK_D"""
    inside = place < num_tokens
    block = tl.load(blocks_ptr + place // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    source = block * stride_block + (place % BLOCK_SIZE) * stride_slot
    if BITS == 4:
        column = tl.arange(0, BLOCK_D // 2)
        mask = inside[:, None] & (column < HEAD_DIM // 2)[None, :]
    else:
        column = tl.arange(0, BLOCK_D)
        mask = inside[:, None] & (column < HEAD_DIM)[None, :]
    tile = tl.load(cache + source[:, None] + column[None, :], mask=mask, other=0.0)
    if BITS == 16:
        return tile
    else:
        own = (block * NUM_KV_HEADS + head) * BLOCK_SIZE + place % BLOCK_SIZE
        word = tl.load(words + own, mask=inside, other=0)
        if BITS == 8:
            codes = tl.where(mask, tile.to(tl.float32), 0.0)
        else:
            low = (tile & 15).to(tl.float32) - 7.5
            high = (tile >> 4).to(tl.float32) - 7.5
            halves = tl.permute(tl.join(low, high), (0, 2, 1))
            codes = tl.reshape(halves, (tile.shape[0], BLOCK_D))
        numbers = word_zero(word)[:, None] + word_scale(word)[:, None] * codes
        exists = inside[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
        return tl.where(exists, numbers, 0.0)
