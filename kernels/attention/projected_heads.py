"""Heads of a decode row's projection, normed and rotated in registers.

All loads come first: a norm's sum synchronises warps, and the compiler moves no load ahead of that.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _second(dim, HALVES: tl.constexpr, ROTARY_DIM: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the channels read alongside `dim`: with HALVES the upper half's, else each one's
    partner in the rotation.
    """
    if HALVES:
        return HEAD_DIM // 2 + dim
    elif ROTARY_DIM:
        return (dim + ROTARY_DIM // 2) % ROTARY_DIM
    else:
        return dim


@triton.jit
def raw_heads(
    head_ptr,
    dim,
    mask,
    HALVES: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Load heads, [n, BLOCK] float32: channels `dim`, [BLOCK], and their `_second` ones. mask: [n,
    BLOCK].
    """
    x = tl.load(head_ptr + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    y = x
    if HALVES or ROTARY_DIM > 0:
        second = _second(dim, HALVES, ROTARY_DIM, HEAD_DIM)
        y = tl.load(head_ptr + second[None, :], mask=mask, other=0.0).to(tl.float32)
    return x, y


@triton.jit
def norm_weights(
    weight_ptr,
    dim,
    in_head,
    NORM: tl.constexpr,
    HALVES: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Return the norm weights of the channels that `raw_heads` loads; undefined without NORM."""
    x = dim.to(tl.float32)
    y = x
    if NORM:
        x = tl.load(weight_ptr + dim, mask=in_head, other=0.0).to(tl.float32)
        second = _second(dim, HALVES, ROTARY_DIM, HEAD_DIM)
        y = tl.load(weight_ptr + second, mask=in_head, other=0.0).to(tl.float32)
    return x, y


@triton.jit
def rotation_angles(
    cos_sin_ptr,
    positions_ptr,
    row,
    newest,
    stride_cos_sin,
    dim,
    in_head,
    HALVES: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Return cosines and sines of channels `dim` as `normed_rotated_heads` takes them, [BLOCK]
    float32; of the row's position in positions_ptr, or without POSITIONS of `newest`."""
    cos = tl.zeros(dim.shape, tl.float32)
    sin = tl.zeros(dim.shape, tl.float32)
    if ROTARY_DIM:
        TURN: tl.constexpr = ROTARY_DIM // 2
        turn = newest.to(tl.int64)
        if POSITIONS:
            turn = tl.load(positions_ptr + row)
        angles = cos_sin_ptr + turn * stride_cos_sin + dim % TURN
        turns = in_head & (dim < ROTARY_DIM)
        cos = tl.load(angles, mask=turns, other=1.0)
        sin = tl.load(angles + TURN, mask=turns, other=0.0)
        if not HALVES:
            sin = tl.where(dim < TURN, -sin, sin)
    return cos, sin


@triton.jit
def normed_rotated_heads(
    x,
    y,
    weight_x,
    weight_y,
    eps,
    cos,
    sin,
    NORM: tl.constexpr,
    HALVES: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM_LAST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Norm and rotate what `raw_heads` has loaded, or with NORM_LAST the other way round: [n,
    BLOCK] float32 of channels `dim`, and with HALVES of the upper half, too.

    Without HALVES, `sin` is negated in the first half of the rotated channels, and zero after them;
    with HALVES all channels rotate.
    """
    if NORM and not NORM_LAST:
        scale = _scale(x, y, eps, HALVES, HEAD_DIM)
        x *= scale * weight_x[None, :]
        y *= scale * weight_y[None, :]
    if HALVES:
        if ROTARY_DIM:
            turned = x * cos[None, :] - y * sin[None, :]
            y = y * cos[None, :] + x * sin[None, :]
            x = turned
    elif ROTARY_DIM:
        x = x * cos[None, :] + y * sin[None, :]
    if NORM and NORM_LAST:
        scale = _scale(x, y, eps, HALVES, HEAD_DIM)
        x *= scale * weight_x[None, :]
        y *= scale * weight_y[None, :]
    if not HALVES:
        y = x
    return x, y


@triton.jit
def _scale(x, y, eps, HALVES: tl.constexpr, HEAD_DIM: tl.constexpr):
    squares = tl.sum(x * x, axis=1)
    if HALVES:
        squares += tl.sum(y * y, axis=1)
    return tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
