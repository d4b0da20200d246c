"""How kernels that score cached tokens read them: in place, block by block, all layers in one
launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .caches import cache_addresses


class CachedTokens(NamedTuple):
    """One request's tokens in the caches of several layers of one shape."""

    caches: Sequence[torch.Tensor]
    """[L] of [2, num_blocks, block_size, num_kv_heads, head_dim], floats, all of one shape, strides
    and type; the last stride is 1."""
    blocks: torch.Tensor
    """[columns] int32"""
    num_tokens: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """[L, num_kv_heads, num_tokens], as scores have it."""
        return len(self.caches), self.caches[0].shape[3], self.num_tokens

    def arguments(self) -> tuple[Any, ...]:
        """Return what `keys_of_head` and `token_tile` take, in the order of kernels' arguments."""
        cache = self.caches[0]
        addresses, _ = cache_addresses(self.caches)
        return addresses, cache, self.blocks, self.num_tokens, *cache.stride()[:4]

    def constants(self) -> dict[str, Any]:
        """Return the constants of every kernel."""
        cache = self.caches[0]
        return {
            "NUM_KV_HEADS": cache.shape[3],
            "HEAD_DIM": cache.shape[4],
            "BLOCK_SIZE": cache.shape[2],
            "BLOCK_D": max(16, triton.next_power_of_2(cache.shape[4])),
            "ALIGNED": cache_addresses(self.caches)[1],
        }


@triton.jit
def token_tile(
    head_ptr, blocks_ptr, place, num_tokens, stride_block, stride_slot,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return a head's keys, or values, at these places: [N, BLOCK_D], 0 where there are none.

    head_ptr: to the head of the first token of the first block; place: [N]
    """
    dim = tl.arange(0, BLOCK_D)
    inside = place < num_tokens
    block = tl.load(blocks_ptr + place // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    source = block * stride_block + (place % BLOCK_SIZE) * stride_slot
    mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(head_ptr + source[:, None] + dim[None, :], mask=mask, other=0.0)
