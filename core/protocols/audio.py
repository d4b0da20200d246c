"""The contract of what a model reads of audio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from ..parts.encoder_decoder import FeatureShape


@dataclass(frozen=True)
class SpeechTokens:
    """The tokens by which a decoder is told what to do with speech: it is begun with `start`, a
    language, a task, and `no_timestamps` or a time."""

    start: int
    end: int
    no_timestamps: int
    first_time: int
    """Token of 0 seconds; those behind it count up."""
    seconds_per_time: float
    languages: Mapping[str, int] = field(default_factory=dict)
    """ISO 639-1 → token; {}: the model knows one language, and neither languages nor tasks are
    told."""
    transcribe: int | None = None
    translate: int | None = None
    """Into English."""
    previous: int | None = None
    """Begins the text that came before; None: the model takes none."""
    no_speech: int | None = None
    """Its probability where a language would follow is that of no speech."""
    alignment_heads: tuple[tuple[int, int], ...] = ()
    """(layer, head) of the decoder whose attention to the source tells when a token is said; ():
    the checkpoint names none."""
    median_width: int = 7
    """Of the filter of that attention, in rows of the source."""


class AudioSource(Protocol):
    """Makes what an encoder reads of audio. Called by several threads at once."""

    sampling_rate: int
    """Samples per second."""
    max_samples: int
    """Of one source."""
    shape: FeatureShape
    speech: SpeechTokens | None
    """None: not a model of speech."""

    def features(self, samples: np.ndarray) -> np.ndarray:
        """samples: [num_samples] float32 in -1 to 1, at most `max_samples` → [channels, frames]
        float32"""
