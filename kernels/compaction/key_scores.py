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
TILES = 16
"""Tiles per program that adds them up."""
SHORTEST = tl.constexpr(1e-4)
"""Shorter keys have no direction."""


@triton.jit
def _key_tile(
    keys, key_words, blocks_ptr, head, tile, num_tokens, stride_block, stride_slot,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, KEY_BITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the places of a tile's tokens, [BLOCK_N], and their keys, [BLOCK_N, BLOCK_D]."""
    place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    key = token_tile(
        keys, key_words, blocks_ptr, head, place, num_tokens, stride_block, stride_slot,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_D, KEY_BITS,
    )  # fmt: skip
    return place, key.to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["blocks_ptr"])
def _key_scores_kernel(
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
    NUM_TILES: tl.constexpr,
    SCORE: tl.constexpr,
):
    """One program per (kv head, tile or part, layer).

    SCORE: "norm" writes the norm of each key; "direction" the sum of the directions of the keys of
    a part, which is NUM_TILES tiles; "difference" the negative cosine of each key and mean_ptr.
    """
    head = tl.program_id(0)
    part = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    keys, key_words = head_pointers(
        addresses_ptr, like_key_ptr, layer, head, stride_head, KEY_BITS, ALIGNED, False
    )
    row = layer * NUM_KV_HEADS + head
    dim = tl.arange(0, BLOCK_D)
    if SCORE == "direction":
        total = tl.zeros([BLOCK_D], tl.float32)
        for tile in range(part * NUM_TILES, (part + 1) * NUM_TILES):
            place, key = _key_tile(
                keys, key_words, blocks_ptr, head, tile, num_tokens, stride_block, stride_slot,
                NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_D, KEY_BITS, BLOCK_N,
            )  # fmt: skip
            norm = tl.maximum(tl.sqrt(tl.sum(key * key, axis=1)), SHORTEST)
            total += tl.sum(key * (1.0 / norm)[:, None], axis=0)
        tl.store(out_ptr + (row * tl.num_programs(1) + part) * BLOCK_D + dim, total)
    else:
        place, key = _key_tile(
            keys, key_words, blocks_ptr, head, part, num_tokens, stride_block, stride_slot,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_D, KEY_BITS, BLOCK_N,
        )  # fmt: skip
        score = tl.sqrt(tl.sum(key * key, axis=1))
        if SCORE == "difference":
            mean = tl.load(mean_ptr + row * BLOCK_D + dim)
            score = -tl.sum(key * mean[None, :], axis=1) / tl.maximum(score, SHORTEST)
        tl.store(out_ptr + row * num_tokens + place, score, mask=place < num_tokens)


def _launch(
    out: torch.Tensor, mean: torch.Tensor | None, tokens: CachedTokens, score: str, tiles: int = 1
) -> torch.Tensor:
    """Fill `out`, with `tiles` tiles per program."""
    num_layers, num_kv_heads, num_tokens = tokens.shape
    arguments, constants = tokens.launch_arguments()
    grid = num_kv_heads, triton.cdiv(num_tokens, TILE * tiles), num_layers
    launch(_key_scores_kernel, grid)(
        out, mean, *arguments, **constants, BLOCK_N=TILE, NUM_TILES=tiles, SCORE=score, num_warps=4
    )
    return out


def key_norms(tokens: CachedTokens) -> torch.Tensor:
    """Return the norm of each key, [L, num_kv_heads, num_tokens] float32."""
    out = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.blocks.device)
    return _launch(out, None, tokens, "norm")


def key_differences(tokens: CachedTokens) -> torch.Tensor:
    """Return the negative cosine of each key and the mean direction of all keys of its head,
    [L, num_kv_heads, num_tokens] float32."""
    num_layers, num_kv_heads, num_tokens = tokens.shape
    _, constants = tokens.launch_arguments()
    shape = num_layers, num_kv_heads, triton.cdiv(num_tokens, TILE * TILES), constants["BLOCK_D"]
    sums = torch.empty(shape, dtype=torch.float32, device=tokens.blocks.device)
    _launch(sums, None, tokens, "direction", TILES)
    mean = torch.nn.functional.normalize(sums.sum(2), dim=2)
    out = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.blocks.device)
    return _launch(out, mean, tokens, "difference")
