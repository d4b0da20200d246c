"""Finding markers in text that arrives in pieces, in linear time."""

from __future__ import annotations

from collections.abc import Sequence


def partial_suffix(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of `text` that could be the beginning of a marker (not a whole one)."""
    longest = max(len(marker) for marker in markers)
    for length in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-length:]
        if any(len(marker) > length and marker.startswith(tail) for marker in markers):
            return length
    return 0


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """The marker that begins first: → (position, marker)."""
    found = [(text.find(marker), marker) for marker in markers]
    present = [(position, marker) for position, marker in found if position >= 0]
    return min(present) if present else None
