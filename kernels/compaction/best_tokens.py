"""Which tokens of each layer and head have the highest scores, in one launch and without sorting.

A program finds the lowest score that stays, 2 bits per pass over its row, then writes the tokens at
or above it in order. Memory: a row is read 17 times, all but the first from a cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..indexer.top_scores import MAX_TILE, kept_of_tile, lowest_kept
from ..launch import launch


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
    layer = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = scores_ptr + (layer * NUM_HEADS + head) * num_tokens
    out = out_ptr + layer * stride_layer + head
    offs = tl.arange(0, BLOCK)
    limit, num_equal = lowest_kept(row, num_tokens, num_kept, BLOCK)
    written = tl.zeros((), tl.int32)
    for start in range(0, num_tokens, BLOCK):
        place = start + offs
        stays, target, num_equal, written = kept_of_tile(
            row, place, num_tokens, limit, num_equal, written
        )
        tl.store(out + target.to(tl.int64) * NUM_HEADS, place, mask=stays)


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
