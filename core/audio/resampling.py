"""Samples at another rate, by the package soxr."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..errors import InvalidRequest

LOWEST_RATE, HIGHEST_RATE = 1_000, 384_000
"""Samples per second."""


def soxr(rate: float, field: str) -> ModuleType:
    """Import the package. Raises InvalidRequest if it is not installed."""
    try:
        import soxr
    except ImportError:
        raise InvalidRequest(
            f"{field}: {rate:g} samples per second; for other rates than the model's the server "
            "needs the package soxr: pip install soxr",
            param=field,
        ) from None
    module: ModuleType = soxr
    return module


def check_rate(rate: float, field: str) -> None:
    """Raises InvalidRequest for a rate that no recording has."""
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise InvalidRequest(
            f"{field}: {rate:g} samples per second; {LOWEST_RATE} to {HIGHEST_RATE} are served",
            param=field,
        )


def resampled(samples: np.ndarray, rate: float, wanted: int, field: str) -> np.ndarray:
    """Return samples of one channel, [n] float32, at another rate. Raises InvalidRequest."""
    check_rate(rate, field)
    if rate == wanted:
        return samples
    out: np.ndarray = soxr(rate, field).resample(samples, rate, wanted, quality="HQ")
    return out


class ResampledStream:
    """Samples of one channel that come in pieces."""

    def __init__(self, rate: float, wanted: int, field: str) -> None:
        """Raises InvalidRequest."""
        check_rate(rate, field)
        self._stream: Any = None
        if rate != wanted:
            module = soxr(rate, field)
            self._stream = module.ResampleStream(rate, wanted, 1, dtype="float32", quality="HQ")

    def take(self, samples: np.ndarray, *, last: bool) -> np.ndarray:
        """Return what is ready. last: no more samples come."""
        if self._stream is None:
            return samples
        out: np.ndarray = self._stream.resample_chunk(samples, last=last)
        return out
