"""Which tokens a token attends to in a layer of local attention."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

Position = TypeVar("Position", bound=Any)
"""An int, or an array or tensor of them."""


class Reach(msgspec.Struct, frozen=True):
    """How far back a token sees: within a sliding window, or within chunks.

    Chunks lie at multiples of their size from a sequence's first position on. A token sees the
    tokens up to itself of its own chunk and of the `chunk_lookback` chunks before it.
    """

    window: int | None = None
    """A token sees itself and the `window - 1` before it."""
    chunk_size: int | None = None
    """In tokens. Exactly one of this and `window` is not None."""
    chunk_lookback: int = 0

    @property
    def most_tokens(self) -> int:
        """Return the most tokens that a token sees, itself included."""
        if self.chunk_size is not None:
            return (self.chunk_lookback + 1) * self.chunk_size
        assert self.window is not None
        return self.window

    @property
    def alignment(self) -> int:
        """Return the number of which each first visible position is a multiple."""
        return self.chunk_size or 1

    def first_visible(self, position: Position) -> Position:
        """Return the first position that a token sees; less than 0 where it sees all. It never
        decreases with the position."""
        last = position
        if self.chunk_size is not None:
            # A chunk's tokens see what the last of them has in a window of whole chunks.
            last = (position // self.chunk_size + 1) * self.chunk_size - 1
        return last - self.most_tokens + 1
