"""Decodes recordings within bounds."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ..audio.files import AudioFile
from ..audio.source import check_seconds, samples_of
from ..errors import InvalidRequest

MAX_SECONDS = 600
"""Longest recording in a prompt."""
DECODE_SECONDS = 20
"""Longest work on one recording."""
_WINDOW_SECONDS = 10


def decode_audio(value: Any, rate: int, most: int | None, field: str) -> np.ndarray:
    """Return the samples of one channel, [n] float32, of a file's bytes, of an array, or of
    (array, rate). most: samples that the model takes. Raises InvalidRequest."""
    seconds = MAX_SECONDS if most is None else min(MAX_SECONDS, most / rate)
    if not isinstance(value, bytes | bytearray | memoryview):
        return samples_of(value, rate, field, field, seconds)
    return _decoded(bytes(value), rate, seconds, field)


def _decoded(data: bytes, rate: int, seconds: float, field: str) -> np.ndarray:
    deadline = time.monotonic() + DECODE_SECONDS
    file = AudioFile(data, rate, field)
    window, done = _WINDOW_SECONDS * rate, 0
    pieces: list[np.ndarray] = []
    while not pieces or len(pieces[-1]) == window:
        pieces.append(file.window(done, window))
        done += len(pieces[-1])
        # By what was decoded: headers may say anything.
        check_seconds(done / rate, seconds, field, field)
        if time.monotonic() > deadline:
            raise InvalidRequest(
                f"{field}: the recording was not decoded within {DECODE_SECONDS:g} seconds",
                param=field,
            )
    if not done:
        raise InvalidRequest(f"{field}: the recording has no samples", param=field)
    return np.concatenate(pieces)
