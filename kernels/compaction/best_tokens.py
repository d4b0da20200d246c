"""Which tokens of each layer and head have the highest scores, in one launch and without sorting.

A program finds the lowest score that stays, 2 bits of it per pass over its row, then writes the
tokens at or above it in order. Memory: a row is read 18 times, of which all but the first are from
a cache: 32,768 float32 scores are 128 KiB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launch import launch

MAX_TILE = 4096
LOWEST = tl.constexpr(-(1 << 31))


@triton.jit
def _ordered(row, place, inside):
    """Return scores as integers of the same order; -0.0 as 0.0."""
    score = tl.load(row + place, mask=inside, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit(
    do_not_specialize=["num_tokens", "num_kept", "stride_layer"],
    do_not_specialize_on_alignment=["out_ptr"],
)
def _best_tokens_kernel(
    scores_ptr,
    out_ptr,
    num_tokens,
    num_kept,
    stride_layer,
    NUM_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per (layer, head)."""
    layer = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = scores_ptr + (layer * NUM_HEADS + head) * num_tokens
    out = out_ptr + layer * stride_layer + head
    offs = tl.arange(0, BLOCK)
    # The highest limit with num_kept scores at or above it.
    limit = tl.full((), LOWEST, tl.int32)
    for step in range(16):
        unit = tl.full((), 1, tl.int32) << (30 - 2 * step)
        first = tl.zeros([BLOCK], tl.int32)
        second = tl.zeros([BLOCK], tl.int32)
        third = tl.zeros([BLOCK], tl.int32)
        for start in range(0, num_tokens, BLOCK):
            place = start + offs
            inside = place < num_tokens
            order = _ordered(row, place, inside)
            first += (inside & (order >= limit + unit)).to(tl.int32)
            second += (inside & (order >= limit + unit + unit)).to(tl.int32)
            third += (inside & (order >= limit + unit + unit + unit)).to(tl.int32)
        digit = (tl.sum(first) >= num_kept).to(tl.int32)
        digit += (tl.sum(second) >= num_kept).to(tl.int32)
        digit += (tl.sum(third) >= num_kept).to(tl.int32)
        limit += digit * unit
    above = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_tokens, BLOCK):
        place = start + offs
        inside = place < num_tokens
        above += (inside & (_ordered(row, place, inside) > limit)).to(tl.int32)
    num_equal = num_kept - tl.sum(above)
    written = tl.zeros((), tl.int32)
    for start in range(0, num_tokens, BLOCK):
        place = start + offs
        inside = place < num_tokens
        order = _ordered(row, place, inside)
        equal = (inside & (order == limit)).to(tl.int32)
        stays = (inside & (order > limit)) | ((equal != 0) & (tl.cumsum(equal) <= num_equal))
        target = written + tl.cumsum(stays.to(tl.int32)) - 1
        tl.store(out + target.to(tl.int64) * NUM_HEADS, place, mask=stays)
        num_equal -= tl.minimum(tl.sum(equal), num_equal)
        written += tl.sum(stays.to(tl.int32))


def best_tokens(scores: torch.Tensor, out: torch.Tensor) -> None:
    """See `core.nn.operations.Operations.best_tokens`."""
    num_layers, num_heads, num_tokens = scores.shape
    assert scores.is_contiguous() and out.stride()[1:] == (num_heads, 1)
    launch(_best_tokens_kernel, (num_layers, num_heads))(
        scores,
        out,
        num_tokens,
        out.shape[1],
        out.stride(0),
        NUM_HEADS=num_heads,
        BLOCK=MAX_TILE,
        num_warps=8,
    )
