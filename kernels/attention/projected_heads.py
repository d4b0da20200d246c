"""Heads of a decode row's projection, normed and rotated in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _head(
    head_ptr,
    weight_ptr,
    eps,
    cos,
    sin,
    mask,
    NORM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM_LAST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Heads [n, BLOCK_D], normed and rotated, or with NORM_LAST the other way round, float32. `sin`
    is negative in the first half of the channels that turn, and zero behind them.

    Each channel is read together with its partner in the rotation.
    """
    dim = tl.arange(0, BLOCK_D)
    ROTATE: tl.constexpr = ROTARY_DIM > 0
    partner = dim
    if ROTATE:
        partner = (dim + ROTARY_DIM // 2) % ROTARY_DIM
    x = tl.load(head_ptr + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROTATE:
        y = tl.load(head_ptr + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM and not NORM_LAST:
        in_head = dim < HEAD_DIM
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x *= scale * tl.load(weight_ptr + dim, mask=in_head, other=0.0)[None, :]
        if ROTATE:
            y *= scale * tl.load(weight_ptr + partner, mask=in_head, other=0.0)[None, :]
    if ROTATE:
        x = x * cos[None, :] + y * sin[None, :]
    if NORM and NORM_LAST:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x *= scale * tl.load(weight_ptr + dim, mask=dim < HEAD_DIM, other=0.0)[None, :]
    return x


@triton.jit
def _normed_halves(x, y, weight_ptr, eps, in_half, HALF: tl.constexpr, BLOCK_H: tl.constexpr):
    """Both halves of heads, [n, BLOCK_H] each, by one norm. Zeros behind HALF."""
    dim = tl.arange(0, BLOCK_H)
    squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    x *= scale * tl.load(weight_ptr + dim, mask=in_half, other=0.0)[None, :]
    y *= scale * tl.load(weight_ptr + HALF + dim, mask=in_half, other=0.0)[None, :]
    return x, y


@triton.jit
def _half_heads(
    head_ptr,
    weight_ptr,
    eps,
    cos,
    sin,
    mask,
    NORM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM_LAST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """As `_head` with all channels turned, in two halves [n, BLOCK_H]. `sin` is as it is."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, BLOCK_H)
    x = tl.load(head_ptr + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(head_ptr + HALF + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    in_half = dim < HALF
    if NORM and not NORM_LAST:
        x, y = _normed_halves(x, y, weight_ptr, eps, in_half, HALF, BLOCK_H)
    if ROTARY_DIM:
        turned = x * cos[None, :] - y * sin[None, :]
        y = y * cos[None, :] + x * sin[None, :]
        x = turned
    if NORM and NORM_LAST:
        x, y = _normed_halves(x, y, weight_ptr, eps, in_half, HALF, BLOCK_H)
    return x, y
