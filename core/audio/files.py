"""Audio files, read piece by piece: memory holds as much as a model reads at once."""

from __future__ import annotations

import io
import wave
from typing import Any, Protocol

import numpy as np

from ..errors import InvalidRequest
from .resampling import ResampledStream

BLOCK = 1 << 16
"""Samples per channel that are decoded at once."""
MAX_CHANNELS = 64


class Decoder(Protocol):
    """Samples of an open file."""

    rate: int

    def read(self, count: int) -> np.ndarray:
        """Return the next samples, [at most count, channels] float32; none at the end."""


class Recording(Protocol):
    """A recording of one channel, read window by window."""

    sampling_rate: int

    @property
    def num_samples(self) -> int:
        """Return how many were read so far: all of them, once a window was not full."""

    def window(self, start: int, count: int) -> np.ndarray:
        """Return samples start .. start + count, fewer at the end."""


class Samples:
    """A recording in memory."""

    def __init__(self, samples: np.ndarray, sampling_rate: int) -> None:
        """samples: [n] float32"""
        self._samples, self.sampling_rate = samples, sampling_rate

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    def window(self, start: int, count: int) -> np.ndarray:
        return self._samples[start : start + count]


class AudioFile:
    """A recording, whose channels are averaged, at a model's sampling rate. Not for several threads
    at once; everything may take long."""

    def __init__(self, data: bytes, sampling_rate: int, field: str = "file") -> None:
        """Raises InvalidRequest for data that is not a recording."""
        self._field, self.sampling_rate = field, sampling_rate
        try:
            self._decoder = _decoder(data, field)
        except InvalidRequest:
            raise
        except Exception as error:  # Libraries raise many kinds for what a client may send.
            raise self._unreadable(error) from error
        self._stream = ResampledStream(self._decoder.rate, sampling_rate, field)
        self._samples = np.zeros(0, dtype=np.float32)
        self._first = 0
        self._ended = False

    @property
    def num_samples(self) -> int:
        """Return how many were read so far: all of them, once a window was not full."""
        return self._first + len(self._samples)

    def window(self, start: int, count: int) -> np.ndarray:
        """Return samples start .. start + count, fewer at the end. What is before `start` is
        forgotten. Raises InvalidRequest if the file is damaged."""
        assert start >= self._first, "what is behind was forgotten"
        while not self._ended and self.num_samples < start + count:
            self._read()
        self._samples = self._samples[start - self._first :]
        self._first = start
        return self._samples[:count]

    def _read(self) -> None:
        try:
            block = self._decoder.read(BLOCK)
            self._ended = len(block) < BLOCK
            mono = np.ascontiguousarray(block.mean(axis=1, dtype=np.float32))
            ready = self._stream.take(mono, last=self._ended)
        except Exception as error:
            raise self._unreadable(error) from error
        if not np.isfinite(ready).all():
            raise self._unreadable(ValueError("samples that are no numbers"))
        self._samples = np.concatenate([self._samples, ready])

    def _unreadable(self, error: Exception) -> InvalidRequest:
        return InvalidRequest(
            f"{self._field}: the recording cannot be read: {error}", param=self._field
        )


def _decoder(data: bytes, field: str) -> Decoder:
    try:
        import soundfile  # noqa: F401
    except ImportError:
        return _Wave(data, field)
    return _SoundFile(data, field)


class _SoundFile:
    """What libsndfile reads: WAV, FLAC, OGG, MP3 and others."""

    def __init__(self, data: bytes, field: str) -> None:
        import soundfile

        self._file: Any = soundfile.SoundFile(io.BytesIO(data))
        self.rate = int(self._file.samplerate)
        _check_channels(self._file.channels, field)

    def read(self, count: int) -> np.ndarray:
        samples: np.ndarray = self._file.read(count, dtype="float32", always_2d=True)
        return samples


class _Wave:
    """WAV files of 16 bits, without a library."""

    def __init__(self, data: bytes, field: str) -> None:
        try:
            self._file = wave.open(io.BytesIO(data))
            plain = self._file.getsampwidth() == 2
        except (wave.Error, EOFError):
            plain = False
        if not plain:
            raise InvalidRequest(
                f"{field}: for other files than WAV of 16 bits the server needs the package "
                "soundfile: pip install soundfile",
                param=field,
            )
        self.rate, self._channels = self._file.getframerate(), self._file.getnchannels()
        _check_channels(self._channels, field)

    def read(self, count: int) -> np.ndarray:
        words = np.frombuffer(self._file.readframes(count), dtype="<i2")
        words = words[: len(words) // self._channels * self._channels]
        return words.reshape(-1, self._channels).astype(np.float32) / (1 << 15)


def _check_channels(count: int, field: str) -> None:
    if count > MAX_CHANNELS:
        raise InvalidRequest(
            f"{field}: has {count} channels; at most {MAX_CHANNELS} are read", param=field
        )
