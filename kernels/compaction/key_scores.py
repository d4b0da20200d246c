"""Scores of cached tokens by their keys alone, all layers and heads in one launch.

Memory: `key_norms` reads the keys once, `key_differences` twice; scores are written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch
from .cached_tokens import CachedTokens, head_pointers, token_tile

TILE = 64
"""Tokens that a program reads at a time."""
TILES = 16
"""Tiles of a program that adds them up."""
SHORTEST = tl.constexpr(1e-4)
"""Keys that are shorter have no direction."""


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["blocks_ptr"])
def _norms_kernel(
    out_ptr,
    addresses_ptr,
    like_key_ptr,
    like_value_ptr,
    blocks_ptr,
    num_tokens,
    stride_block,
    stride_slot,
    stride_head,
    stride_value_block,
    stride_value_slot,
    stride_value_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per (kv head, tile, layer)."""
    head = tl.program_id(0)
    layer = tl.program_id(2).to(tl.int64)
    keys, key_words = head_pointers(
        addresses_ptr, like_key_ptr, layer, head, stride_head, KEY_BITS, ALIGNED, False
    )
    place = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    key = token_tile(
        keys, key_words, blocks_ptr, head, place, num_tokens, stride_block, stride_slot,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_D, KEY_BITS,
    ).to(tl.float32)  # fmt: skip
    norm = tl.sqrt(tl.sum(key * key, axis=1))
    out = out_ptr + (layer * NUM_KV_HEADS + head) * num_tokens
    tl.store(out + place, norm, mask=place < num_tokens)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["blocks_ptr"])
def _directions_kernel(
    out_ptr,
    addresses_ptr,
    like_key_ptr,
    like_value_ptr,
    blocks_ptr,
    num_tokens,
    stride_block,
    stride_slot,
    stride_head,
    stride_value_block,
    stride_value_slot,
    stride_value_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """Sum the directions of a part's keys. One program per (kv head, part, layer)."""
    head = tl.program_id(0)
    part = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    keys, key_words = head_pointers(
        addresses_ptr, like_key_ptr, layer, head, stride_head, KEY_BITS, ALIGNED, False
    )
    total = tl.zeros([BLOCK_D], tl.float32)
    for tile in range(part * NUM_TILES, (part + 1) * NUM_TILES):
        place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        key = token_tile(
            keys, key_words, blocks_ptr, head, place, num_tokens, stride_block, stride_slot,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_D, KEY_BITS,
        ).to(tl.float32)  # fmt: skip
        norm = tl.maximum(tl.sqrt(tl.sum(key * key, axis=1)), SHORTEST)
        total += tl.sum(key * (1.0 / norm)[:, None], axis=0)
    out = out_ptr + ((layer * NUM_KV_HEADS + head) * tl.num_programs(1) + part) * BLOCK_D
    tl.store(out + tl.arange(0, BLOCK_D), total)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["blocks_ptr"])
def _differences_kernel(
    out_ptr,
    mean_ptr,
    addresses_ptr,
    like_key_ptr,
    like_value_ptr,
    blocks_ptr,
    num_tokens,
    stride_block,
    stride_slot,
    stride_head,
    stride_value_block,
    stride_value_slot,
    stride_value_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per (kv head, tile, layer)."""
    head = tl.program_id(0)
    layer = tl.program_id(2).to(tl.int64)
    keys, key_words = head_pointers(
        addresses_ptr, like_key_ptr, layer, head, stride_head, KEY_BITS, ALIGNED, False
    )
    place = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    key = token_tile(
        keys, key_words, blocks_ptr, head, place, num_tokens, stride_block, stride_slot,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_D, KEY_BITS,
    ).to(tl.float32)  # fmt: skip
    row = layer * NUM_KV_HEADS + head
    mean = tl.load(mean_ptr + row * BLOCK_D + tl.arange(0, BLOCK_D))
    norm = tl.maximum(tl.sqrt(tl.sum(key * key, axis=1)), SHORTEST)
    score = -tl.sum(key * mean[None, :], axis=1) / norm
    tl.store(out_ptr + row * num_tokens + place, score, mask=place < num_tokens)


def key_norms(tokens: CachedTokens) -> torch.Tensor:
    """Return the norm of each key, [L, num_kv_heads, num_tokens] float32."""
    num_layers, num_kv_heads, num_tokens = tokens.shape
    arguments, constants = tokens.launch_arguments()
    out = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.blocks.device)
    launch(_norms_kernel, (num_kv_heads, triton.cdiv(num_tokens, TILE), num_layers))(
        out, *arguments, **constants, BLOCK_N=TILE, num_warps=4
    )
    return out


def key_differences(tokens: CachedTokens) -> torch.Tensor:
    """Return the negative cosine of each key and the mean direction of all keys of its head,
    [L, num_kv_heads, num_tokens] float32."""
    num_layers, num_kv_heads, num_tokens = tokens.shape
    device = tokens.blocks.device
    arguments, constants = tokens.launch_arguments()
    parts = triton.cdiv(num_tokens, TILE * TILES)
    sums = torch.empty(
        num_layers, num_kv_heads, parts, constants["BLOCK_D"], dtype=torch.float32, device=device
    )
    launch(_directions_kernel, (num_kv_heads, parts, num_layers))(
        sums, *arguments, **constants, BLOCK_N=TILE, NUM_TILES=TILES, num_warps=4
    )
    mean = torch.nn.functional.normalize(sums.sum(2), dim=2)
    out = torch.empty(tokens.shape, dtype=torch.float32, device=device)
    launch(_differences_kernel, (num_kv_heads, triton.cdiv(num_tokens, TILE), num_layers))(
        out, mean, *arguments, **constants, BLOCK_N=TILE, num_warps=4
    )
    return out
