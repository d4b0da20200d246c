"""Which other key each key of a request resembles: the newest, or the most similar one.

Operations: 2 * head_dim per pair of keys and head. Memory: the keys once, and once more for each
tile of rows (from the L2 cache, mostly).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch

MAX_TILE, TILE_BYTES = 128, 32768
"""Keys of a tile; fewer where channels are many or wide."""
TILES_AT_ONCE = 8
"""Tiles after which a program checks whether all of its keys are matched."""


@triton.jit
def _key_tile(
    keys_ptr, place, num_tokens, stride_token, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    dim = tl.arange(0, BLOCK_D)
    mask = (place < num_tokens)[:, None] & (dim < HEAD_DIM)[None, :]
    source = place.to(tl.int64)[:, None] * stride_token + dim[None, :]
    return tl.load(keys_ptr + source, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def _newest_kernel(
    out_ptr,
    keys_ptr,
    norms_ptr,
    num_tokens,
    similar,
    stride_token,
    stride_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per (tile of keys, head), from the newest tile of others to the oldest."""
    head = tl.program_id(1)
    keys = keys_ptr + head * stride_head
    norms = norms_ptr + head.to(tl.int64) * num_tokens
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = _key_tile(keys, row, num_tokens, stride_token, HEAD_DIM, BLOCK_D)
    bound = similar * tl.load(norms + row, mask=row < num_tokens, other=1.0)
    newest = tl.where(row < num_tokens, -1, 0)
    end = tl.cdiv(num_tokens, BLOCK_N)
    while (end > 0) & (tl.min(newest) < 0):
        begin = tl.maximum(end - CHUNK, 0)
        for tile in range(begin, end):
            place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            key = _key_tile(keys, place, num_tokens, stride_token, HEAD_DIM, BLOCK_D)
            norm = tl.load(norms + place, mask=place < num_tokens, other=1.0)
            product = tl.dot(own, tl.trans(key), input_precision="ieee") * (1.0 / norm)[None, :]
            found = (product > bound[:, None]) & (place[None, :] != row[:, None])
            newest = tl.maximum(newest, tl.max(tl.where(found, place[None, :], -1), axis=1))
        end = begin
    out = out_ptr + head.to(tl.int64) * num_tokens
    tl.store(out + row, newest, mask=row < num_tokens)


@triton.jit(do_not_specialize=["num_tokens", "num_others"])
def _nearest_kernel(
    cosine_ptr,
    index_ptr,
    keys_ptr,
    norms_ptr,
    others_ptr,
    other_norms_ptr,
    num_tokens,
    num_others,
    stride_token,
    stride_head,
    stride_other,
    stride_other_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per (tile of keys, head)."""
    head = tl.program_id(1)
    keys = keys_ptr + head * stride_head
    others = others_ptr + head * stride_other_head
    norms = norms_ptr + head.to(tl.int64) * num_tokens
    other_norms = other_norms_ptr + head.to(tl.int64) * num_others
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = _key_tile(keys, row, num_tokens, stride_token, HEAD_DIM, BLOCK_D)
    norm = tl.load(norms + row, mask=row < num_tokens, other=1.0)
    best = tl.full([BLOCK_N], -float("inf"), tl.float32)
    index = tl.zeros([BLOCK_N], tl.int32)
    for tile in range(0, tl.cdiv(num_others, BLOCK_N)):
        place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        key = _key_tile(others, place, num_others, stride_other, HEAD_DIM, BLOCK_D)
        inverse = 1.0 / tl.load(other_norms + place, mask=place < num_others, other=1.0)
        product = tl.dot(own, tl.trans(key), input_precision="ieee") * inverse[None, :]
        product = tl.where((place < num_others)[None, :], product, -float("inf"))
        highest, at = tl.max(product, axis=1, return_indices=True)
        index = tl.where(highest > best, tile * BLOCK_N + at, index)
        best = tl.maximum(best, highest)
    out = head.to(tl.int64) * num_tokens + row
    tl.store(cosine_ptr + out, best / norm, mask=row < num_tokens)
    tl.store(index_ptr + out, index, mask=row < num_tokens)


def _shape(keys: torch.Tensor) -> dict[str, int]:
    head_dim = keys.shape[2]
    block_d = max(16, int(triton.next_power_of_2(head_dim)))
    tile = min(MAX_TILE, TILE_BYTES // (block_d * keys.element_size()))
    return {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_N": tile, "num_warps": 8}


def key_lengths(keys: torch.Tensor) -> torch.Tensor:
    """keys: [num_tokens, num_kv_heads, head_dim] → norms, [num_kv_heads, num_tokens] float32, none
    0"""
    norms: torch.Tensor = torch.linalg.vector_norm(keys, dim=2, dtype=torch.float32)
    return norms.clamp_(min=1e-12).T.contiguous()


def newest_similar(keys: torch.Tensor, similar: float) -> torch.Tensor:
    """Return the newest other key whose cosine with each key is over `similar`, [num_kv_heads,
    num_tokens] int32; -1: there is none. keys: [num_tokens, num_kv_heads, head_dim], the last
    stride 1; similar: not negative."""
    num_tokens, num_kv_heads, _ = keys.shape
    constants = _shape(keys)
    out = torch.empty(num_kv_heads, num_tokens, dtype=torch.int32, device=keys.device)
    launch(_newest_kernel, (triton.cdiv(num_tokens, constants["BLOCK_N"]), num_kv_heads))(
        out,
        keys,
        key_lengths(keys),
        num_tokens,
        similar,
        keys.stride(0),
        keys.stride(1),
        CHUNK=TILES_AT_ONCE,
        **constants,
    )
    return out


def most_similar(keys: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosine of each key with the most similar of the others, [num_kv_heads, num_tokens]
    float32 and its index, int64; ties are arbitrary.

    keys, others: [num_tokens, num_kv_heads, head_dim], [num_others, ...], the last stride 1
    """
    num_tokens, num_kv_heads, _ = keys.shape
    constants = _shape(keys)
    cosine = torch.empty(num_kv_heads, num_tokens, dtype=torch.float32, device=keys.device)
    index = torch.empty(num_kv_heads, num_tokens, dtype=torch.int64, device=keys.device)
    launch(_nearest_kernel, (triton.cdiv(num_tokens, constants["BLOCK_N"]), num_kv_heads))(
        cosine,
        index,
        keys,
        key_lengths(keys),
        others,
        key_lengths(others),
        num_tokens,
        len(others),
        keys.stride(0),
        keys.stride(1),
        others.stride(0),
        others.stride(1),
        **constants,
    )
    return cosine, index
