"""The rows of a step, as kernels over states get them."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch
import triton
import triton.language as tl

PLACES = ["query_start_ptr", "seq_lens_ptr", "slots_ptr"]
"""Arguments that may be unaligned in an int32 array: kernels are not specialised for their
alignment."""


ROWS = tl.constexpr(256)
WHOLE = tl.constexpr(1 << 30)
MOST_ROWS = 8
"""Rows of several tokens that a launch has programs for; these walk over more. Most recorded steps
have few, and large idle programs keep others out."""


class Rows(Protocol):
    """R rows; a row continues the state of its slot, or begins from zeros if its first token is its
    sequence's first. Rows without tokens come last."""

    @property
    def query_start(self) -> torch.Tensor:
        """[R + 1] int32: row r's tokens are query_start[r] .. query_start[r + 1]."""

    @property
    def seq_lens(self) -> torch.Tensor:
        """[R] int32: tokens of each sequence, those of this step included."""

    @property
    def slots(self) -> torch.Tensor:
        """[R] int32 or int64: index of each row's state."""

    @property
    def max_query_len(self) -> int:
        """Tokens of the longest row, or more; 1: every row has one."""


ScanWeights: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[float, float]]
"""Rates, factors of inputs in outputs, biases of step sizes and their range: `ScanWeights` of
`core.nn.state.operations`."""


@triton.jit
def row_of(row, query_start_ptr, seq_lens_ptr, slots_ptr):
    """Return a row's first token, number of tokens, slot, and whether its sequence begins."""
    start = tl.load(query_start_ptr + row)
    count = tl.load(query_start_ptr + row + 1) - start
    slot = tl.load(slots_ptr + row).to(tl.int64)
    return start.to(tl.int64), count, slot, tl.load(seq_lens_ptr + row) == count


@triton.jit
def longer_row(index, query_start_ptr, num_rows, CHUNK: tl.constexpr, LEAST: tl.constexpr = 1):
    """Return the row of a chunk, its number in its row, and the number of all chunks; row -1: there
    are not so many.

    Rows of more than LEAST tokens are divided into chunks, numbered in the order of rows.
    """
    row, part, before = -1, -1, 0
    for low in range(0, num_rows, ROWS):
        at = low + tl.arange(0, ROWS)
        start = tl.load(query_start_ptr + at, mask=at < num_rows, other=0)
        count = tl.load(query_start_ptr + at + 1, mask=at < num_rows, other=0) - start
        chunks = tl.where(count > LEAST, (count + CHUNK - 1) // CHUNK, 0)
        end = before + tl.cumsum(chunks, axis=0)
        place = index - (end - chunks)
        matches = (place >= 0) & (index < end)
        row = tl.maximum(row, tl.max(tl.where(matches, at, -1), axis=0))
        part = tl.maximum(part, tl.max(tl.where(matches, place, -1), axis=0))
        before += tl.sum(chunks, axis=0)
    return row, part, before


@triton.jit
def long_row(index, query_start_ptr, num_rows, CHUNK: tl.constexpr, LONG: tl.constexpr = 1):
    """Return the index-th row of more than LONG tokens, the number of its first chunk among all
    chunks of such rows, and the number of these rows."""
    row, first, num_long, num_chunks = -1, 0, 0, 0
    for low in range(0, num_rows, ROWS):
        at = low + tl.arange(0, ROWS)
        start = tl.load(query_start_ptr + at, mask=at < num_rows, other=0)
        count = tl.load(query_start_ptr + at + 1, mask=at < num_rows, other=0) - start
        is_long = (count > LONG).to(tl.int32)
        chunks = is_long * ((count + CHUNK - 1) // CHUNK)
        here = (is_long > 0) & (num_long + tl.cumsum(is_long, axis=0) == index + 1)
        before = num_chunks + tl.cumsum(chunks, axis=0) - chunks
        row = tl.maximum(row, tl.max(tl.where(here, at, -1), axis=0))
        first = tl.maximum(first, tl.max(tl.where(here, before, 0), axis=0))
        num_long += tl.sum(is_long, axis=0)
        num_chunks += tl.sum(chunks, axis=0)
    return row, first, num_long


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def log_decay(step, rate, BOUND: tl.constexpr):
    """Return the logarithm of a state's decay, float32: rate softplus(step), or with a BOUND of at
    most 0, BOUND sigmoid(-rate step)."""
    if BOUND is None:
        return rate * softplus(step)
    else:
        return BOUND / (1.0 + tl.exp(rate * step))
