"""Which keys a query of a layer with local attention sees: those of a window, or of chunks."""

from __future__ import annotations

import triton
import triton.language as tl


def reach_constants(
    sliding_window: int | None, attention_chunk_size: int | None, chunk_lookback: int
) -> dict[str, int]:
    """Return a kernel's constants WINDOW and CHUNK; 0: none.

    WINDOW positions are within reach, the last of them the query's own or, with CHUNK, the end of
    its chunk; of them a query sees those up to its own.
    """
    if attention_chunk_size is None:
        return {"WINDOW": sliding_window or 0, "CHUNK": 0}
    window = (chunk_lookback + 1) * attention_chunk_size
    return {"WINDOW": window, "CHUNK": attention_chunk_size}


@triton.jit
def last_hidden(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the last position before those that a query at `position` sees; less than 0 if there
    is none. It never decreases with the query's."""
    if CHUNK > 0:
        position = position // CHUNK * CHUNK + (CHUNK - 1)
    return position - WINDOW
