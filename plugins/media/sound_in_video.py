"""The sound of a video among its frames: a token of each unit of a frame, and of each row of the
sound, in the order of their times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.parts.media import PlacedItem

OPTION = "use_audio_in_video"
ORDER = "sound_order"
"""Tensor of an item: [rows] which row of its frames, and behind them of its sound, comes next."""


def in_chunks(times: np.ndarray, sound: int, chunk: int) -> np.ndarray:
    """Return the order of units at these times, and of so many rows of sound: those of each chunk
    of time together, the units first. Times count rows of sound."""
    chunks = np.concatenate([times // chunk, np.arange(sound) // chunk])
    return np.lexsort((np.arange(len(chunks)), chunks))


def merged(times: np.ndarray, sound: int) -> np.ndarray:
    """Return this order by time alone, units before a row of sound of their time."""
    kinds = np.repeat([0, 1], [len(times), sound])
    return np.lexsort((kinds, np.concatenate([times, np.arange(sound)])))


def sound_rows(item: PlacedItem) -> int:
    """Return how many rows of a placed video are of sound."""
    rows = sum(count for _, count in item.runs)
    return rows - int(np.prod(item.grid)) if item.grid else 0


def times_of(frame_positions: Sequence[int], grid: Sequence[int]) -> np.ndarray:
    """Return the time of each unit of frames."""
    return np.repeat(np.asarray(frame_positions, dtype=np.int64), grid[1] * grid[2])


def positions_within(item: PlacedItem, order: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the positions of a video's rows from that of its first frame on, [3, rows], and what
    follows: behind what is last."""
    sound = sound_rows(item)
    units = np.indices(item.grid).reshape(3, -1)
    units[0] = times_of(item.frame_positions, item.grid)
    heard = np.broadcast_to(np.arange(sound), (3, sound))
    positions = np.concatenate([units, heard], axis=1)
    is_sound = order[-1] >= units.shape[1]
    if is_sound:
        return positions[:, order], sound
    last_frame = units[:, units[0] == units[0, -1]]
    return positions[:, order], int(last_frame.max()) + 1
