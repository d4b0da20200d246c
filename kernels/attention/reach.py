"""Which keys a query sees in local attention: those of a window, or of chunks."""

from __future__ import annotations

import triton
import triton.language as tl


def reach_constants(
    sliding_window: int | None, attention_chunk_size: int | None, chunk_lookback: int
) -> dict[str, int]:
    """Return a kernel's constants WINDOW and CHUNK; 0: none.

    A query sees the last WINDOW positions up to its own or, with CHUNK, up to the end of its chunk,
    of which it sees those up to its own.
    """
    if attention_chunk_size is None:
        return {"WINDOW": sliding_window or 0, "CHUNK": 0}
    window = (chunk_lookback + 1) * attention_chunk_size
    return {"WINDOW": window, "CHUNK": attention_chunk_size}


@triton.jit
def last_hidden(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the last position before those that a query at `position` sees; less than 0 if there
    is none.
    """
    if CHUNK > 0:
        position = position // CHUNK * CHUNK + (CHUNK - 1)
    return position - WINDOW
