"""Tiles of rows of different lengths, in one launch whose size does not depend on them.

Row r's tiles begin at (its first token) // BLOCK_Q + r, so each row has enough tiles of BLOCK_Q
tokens, and the host computes nothing per step.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tiles_of_rows(query_start_ptr, first_row, num_rows, BLOCK_Q: tl.constexpr):
    """Return the number of tiles of the rows from `first_row` on, empty ones included."""
    origin = tl.load(query_start_ptr + first_row)
    end = tl.load(query_start_ptr + first_row + num_rows)
    return (end - origin) // BLOCK_Q + num_rows


@triton.jit
def row_of_tile(tile, query_start_ptr, first_row, num_rows, BLOCK_Q: tl.constexpr):
    """Return the row of a tile, and the tile's number in it: a binary search for the last row that
    begins at or before it.
    """
    origin = tl.load(query_start_ptr + first_row)
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        begins = (tl.load(query_start_ptr + first_row + middle) - origin) // BLOCK_Q + middle
        if begins <= tile:
            low = middle
        else:
            high = middle
    start = tl.load(query_start_ptr + first_row + low)
    return first_row + low, tile - (start - origin) // BLOCK_Q - low
