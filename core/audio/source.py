"""Makes sources of audio that callers give with a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InvalidRequest, shown
from ..parts.encoder_decoder import Source, SourceFeatures
from ..protocols.audio import AudioSource
from .resampling import resampled

FIELD = "multi_modal_data"


def make_source(audio: AudioSource, data: Any) -> Source:
    """Return the source of `multi_modal_data`: {"audio": samples, or (samples, sampling rate),
    or what this function has returned}. Takes long: resampling and a spectrum. Raises
    InvalidRequest."""
    if isinstance(data, dict) and isinstance(data.get("audio"), Source):
        source: Source = data["audio"]
        return source
    samples = _samples(data, audio.sampling_rate)
    if len(samples) > audio.max_samples:
        raise InvalidRequest(
            f"{FIELD}.audio: {len(samples) / audio.sampling_rate:.2f} s; this model reads "
            f"{audio.max_samples / audio.sampling_rate:g} s at once, and "
            "/v1/audio/transcriptions more, piece by piece",
            param=FIELD,
        )
    features = np.ascontiguousarray(audio.features(samples), dtype=np.float32)
    shape = audio.shape
    assert features.shape == (shape.channels, shape.frames), "as the model says"
    return Source(features=SourceFeatures(features.tobytes(), shape.num_rows))


def _samples(data: Any, sampling_rate: int) -> np.ndarray:
    if not isinstance(data, dict) or set(data) != {"audio"}:
        raise InvalidRequest(
            f'{FIELD}: must be {{"audio": (samples, sampling rate)}}: this model reads audio '
            "(over HTTP: /v1/audio/transcriptions)",
            param=FIELD,
        )
    audio = data["audio"]
    if isinstance(audio, list) and len(audio) == 1:
        (audio,) = audio
    return samples_of(audio, sampling_rate, f"{FIELD}.audio", FIELD)


def samples_of(
    audio: Any, sampling_rate: int, field: str, param: str, max_seconds: float | None = None
) -> np.ndarray:
    """Return samples, or (samples, sampling rate), at a model's rate: [n] float32. max_seconds: of
    what is resampled. Raises InvalidRequest."""
    rate: Any = sampling_rate
    if isinstance(audio, tuple) and len(audio) == 2:
        audio, rate = audio
    try:
        samples = np.asarray(audio)
        sound = samples.ndim == 1 and len(samples) and samples.dtype.kind == "f"
    except (TypeError, ValueError):
        sound = False
    if not sound or not np.isfinite(samples).all():
        raise InvalidRequest(
            f"{field}: must be samples of one channel, a one-dimensional array of finite "
            "floats in -1 to 1, or (samples, sampling rate)",
            param=param,
        )
    if isinstance(rate, bool) or not isinstance(rate, int | float | np.number) or not rate > 0:
        raise InvalidRequest(f"{field}: no sampling rate: {shown(rate)}", param=param)
    if max_seconds is not None:
        check_seconds(len(samples) / float(rate), max_seconds, field, param)
    return resampled(samples.astype(np.float32), float(rate), sampling_rate, param)


def check_seconds(seconds: float, most: float, field: str, param: str) -> None:
    """Raise InvalidRequest for a recording that is too long."""
    if seconds > most:
        raise InvalidRequest(
            f"{field}: the recording has more than {most:g} s, which is the most that is read",
            param=param,
        )
