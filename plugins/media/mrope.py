"""Positions of three axes: frames, rows and columns of units (Qwen2-VL, arXiv 2409.12191)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.parts.media import PlacedItem
from ...core.protocols.media import RopeSections
from .sound_in_video import positions_within, sound_rows

SoundOrder = Callable[[PlacedItem], np.ndarray]


def sections_of(rope: Mapping[str, Any]) -> RopeSections:
    """Return the sections of a text part's `rope_parameters`."""
    sizes = tuple(int(size) for size in rope["mrope_section"])
    return RopeSections(sizes, bool(rope.get("mrope_interleaved", False)))


def positions_of(
    items: Sequence[PlacedItem],
    num_tokens: int,
    *,
    behind_frames: bool = False,
    sound_order: SoundOrder | None = None,
    marks_together: bool = False,
) -> tuple[np.ndarray, int]:
    """See `MediaEncoder.positions`. behind_frames: what follows goes on behind the frames, too;
    sound_order: the order of frames and sound in an item; marks_together: where sound begins and
    ends has the position of where its video does.

    The tokens of a picture have the frame, row and column of their unit, from the position that a
    word in its place would have; what follows goes on behind the rows and columns. Later tokens
    begin behind the largest of all. Items without a grid are like words.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    done = position = 0
    for item in items:
        if not item.grid:
            continue
        frames, rows, columns = item.grid
        if sound_order is not None and sound_rows(item):
            [(offset, count)] = item.runs
            start = item.start + offset
            positions[:, done:start] = position + np.arange(start - done)
            position += start - done
            if marks_together and start - done > 1:
                positions[:, start - 1] -= 1
                position -= 1
            own, behind = positions_within(item, sound_order(item))
            positions[:, start : start + count] = position + own
            position += behind
            done = start + count
            if marks_together:
                positions[:, done] = position
                done += 1
            continue
        each = frames // len(item.runs)
        for offset, count in item.runs:
            start = item.start + offset
            positions[:, done:start] = position + np.arange(start - done)
            position += start - done
            done = start + count
            units = np.indices((each, rows, columns)).reshape(3, -1)
            if item.frame_positions:
                units[0] = np.repeat(item.frame_positions, rows * columns)
            positions[:, start:done] = position + units
            position += int(units.max()) + 1 if behind_frames else max(rows, columns)
    positions[:, done:] = position + np.arange(num_tokens - done)
    return positions, int(positions.max(initial=-1)) + 1 - num_tokens
