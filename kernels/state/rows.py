"""The rows of a step, as kernels over states get them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

PLACES = ["query_start_ptr", "seq_lens_ptr", "slots_ptr"]
"""Arguments that may begin anywhere in an array of int32: kernels are not compiled for it."""


class Rows(NamedTuple):
    """R rows; a row continues the state of its slot, or begins from zeros if its first token is its
    sequence's first. Rows without tokens come last."""

    query_start: torch.Tensor
    """[R + 1] int32: row r's tokens are query_start[r] .. query_start[r + 1]."""
    seq_lens: torch.Tensor
    """[R] int32: tokens of each sequence, those of this step included."""
    slots: torch.Tensor
    """[R] int32 or int64: index of each row's state."""
    single: bool
    """Whether every row has one token."""


@triton.jit
def row_of(row, query_start_ptr, seq_lens_ptr, slots_ptr):
    """Return a row's first token, number of tokens, slot, and whether its sequence begins."""
    start = tl.load(query_start_ptr + row)
    count = tl.load(query_start_ptr + row + 1) - start
    slot = tl.load(slots_ptr + row).to(tl.int64)
    return start.to(tl.int64), count, slot, tl.load(seq_lens_ptr + row) == count


@triton.jit
def chunk_of(chunk, query_start_ptr, num_rows, CHUNK: tl.constexpr):
    """Return the first token of a chunk's row, the row's number of tokens, and which of them the
    chunk begins with: of a number that no chunk has, one behind the row's end.

    Rows are cut into chunks from their own begin. The chunks of row r are numbered from
    `query_start[r] // CHUNK + r`, which leaves each row room for its last chunk; the numbers of all
    T tokens are below `T // CHUNK + num_rows`.
    """
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(query_start_ptr + middle) // CHUNK + middle <= chunk
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    start = tl.load(query_start_ptr + low)
    count = tl.load(query_start_ptr + low + 1) - start
    first = (chunk - start // CHUNK - low) * CHUNK
    return start.to(tl.int64), count, first


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), float32; x where that is all that is left of it."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))
