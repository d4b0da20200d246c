"""Tiles of cached latents, and their part of a softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def latent_tile(
    place,
    valid,
    table,
    cache_ptr,
    stride_block,
    stride_slot,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Return the latents [BLOCK_N, BLOCK_L] of these places in the cache, and what follows them in
    their entries [BLOCK_N, BLOCK_R]."""
    offs_l = tl.arange(0, BLOCK_L)
    offs_r = tl.arange(0, BLOCK_R)
    block = tl.load(table + place // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
    entry = cache_ptr + block * stride_block + (place % BLOCK_SIZE) * stride_slot
    mask_l = valid[:, None]
    if LATENT_DIM != BLOCK_L:
        mask_l = mask_l & (offs_l < LATENT_DIM)[None, :]
    latent = tl.load(entry[:, None] + offs_l[None, :], mask=mask_l, other=0.0)
    mask_r = valid[:, None] & (offs_r < ROPE_DIM)[None, :]
    shared = tl.load(entry[:, None] + LATENT_DIM + offs_r[None, :], mask=mask_r, other=0.0)
    return latent, shared


@triton.jit
def fold_latents(acc, m, total, absorbed, turned, latent, shared, valid, scale):
    """Fold a tile into the running softmax: all queries see its valid tokens, of which it has one
    at least, so that the new maximum is finite."""
    LOG2E: tl.constexpr = 1.4426950408889634
    scores = tl.dot(absorbed, tl.trans(latent), input_precision="ieee")
    scores = tl.dot(turned, tl.trans(shared), scores, input_precision="ieee")
    scores = tl.where(valid[None, :], scores * (scale * LOG2E), -float("inf"))
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    weights = tl.exp2(scores - m_new[:, None])
    decay = tl.exp2(m - m_new)
    total = total * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision="ieee")
    return acc, m_new, total
