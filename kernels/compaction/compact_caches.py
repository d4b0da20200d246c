"""Compaction of KV caches: the tokens that stay move to their new places, in one launch.

Memory: keys and values that stay are read and written once; one index per token, layer and head.
Into other blocks, a program moves one tile of one request, layer and head. Within the same blocks,
one program moves all of them, in order: a token never overwrites one that is still to be read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..launch import launch
from .caches import cache_addresses, cache_of_layer

TILE_BYTES = 16384
"""Bytes of keys (and of values) that a program moves at a time."""
MAX_TOKENS = 256


@triton.jit(
    do_not_specialize=["num_tokens", "stride_targets"],
    do_not_specialize_on_alignment=["slots_ptr", "starts_ptr", "chosen_ptr", "targets_ptr"],
)
def _compact_kernel(
    addresses_ptr,
    like_ptr,
    slots_ptr,
    starts_ptr,
    chosen_ptr,
    table_ptr,
    targets_ptr,
    num_tokens,
    stride_kv,
    stride_block,
    stride_slot,
    stride_head,
    stride_table,
    stride_targets,
    COUNT: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.program_id(1)
    request = tl.program_id(2) // NUM_LAYERS
    layer = (tl.program_id(2) % NUM_LAYERS).to(tl.int64)
    keys = cache_of_layer(addresses_ptr, layer, like_ptr, ALIGNED)
    if COUNT == 2:
        values = keys + stride_kv
    slot = tl.load(slots_ptr + request).to(tl.int64)
    begin = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - begin
    table = table_ptr + slot * stride_table
    targets = targets_ptr + request.to(tl.int64) * stride_targets
    own = tile * BLOCK_N
    end = tl.minimum(own + BLOCK_N, count)
    # The targets are other blocks than the sources, or the first ones of them.
    if tl.load(table) == tl.load(targets):
        end = tl.where(tile == 0, count, 0)
    offs_n = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    for first in range(own, end, BLOCK_N):
        place = first + offs_n
        inside = place < count
        at = ((layer * num_tokens + begin + place) * NUM_KV_HEADS) + head
        index = tl.load(chosen_ptr + at, mask=inside, other=0)
        source = tl.load(table + index // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        source = source * stride_block + (index % BLOCK_SIZE) * stride_slot + head * stride_head
        target = tl.load(targets + place // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        target = target * stride_block + (place % BLOCK_SIZE) * stride_slot + head * stride_head
        mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(keys + source[:, None] + dim[None, :], mask=mask)
        if COUNT == 2:
            value = tl.load(values + source[:, None] + dim[None, :], mask=mask)
        # All threads have read before one writes: a tile's targets may be its sources.
        tl.debug_barrier()
        tl.store(keys + target[:, None] + dim[None, :], key, mask=mask)
        if COUNT == 2:
            tl.store(values + target[:, None] + dim[None, :], value, mask=mask)


def compact_caches(
    caches: Sequence[torch.Tensor],
    slots: torch.Tensor,
    starts: torch.Tensor,
    chosen: torch.Tensor,
    block_table: torch.Tensor,
    targets: torch.Tensor,
    most: int,
) -> None:
    """See `core.nn.operations.CacheMoves`, whose tensors these are.

    caches: [1 or 2, num_blocks, block_size, num_kv_heads, width] each, the last stride 1, all of
    one shape, strides and type (fp8 as bytes); most: tokens that stay in one request.
    """
    cache = caches[0]
    _, _, block_size, num_kv_heads, head_dim = cache.shape
    addresses, aligned = cache_addresses(caches)
    block_d = triton.next_power_of_2(head_dim)
    tokens = min(MAX_TOKENS, TILE_BYTES // (block_d * cache.element_size()))
    grid = (num_kv_heads, triton.cdiv(most, tokens), slots.shape[0] * len(caches))
    launch(_compact_kernel, grid)(
        addresses,
        cache,
        slots,
        starts,
        chosen,
        block_table,
        targets,
        chosen.shape[1],
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        cache.stride(3),
        block_table.stride(0),
        targets.stride(0),
        COUNT=cache.shape[0],
        NUM_LAYERS=len(caches),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_N=tokens,
        BLOCK_D=block_d,
        ALIGNED=aligned,
        num_warps=4,
    )
