"""The contract of what a model reads of audio, and how it is asked to write it down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

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
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    """`SamplingParams.extra_args` of requests that write times."""


@dataclass(frozen=True)
class SpeechChat:
    """How a model of chats is asked to write a recording down, for each of its windows."""

    instruction: str = ""
    """What follows the recording in the user's message."""
    translation: str | None = None
    """In its place, or in that of `prompt`, to translate into English; None: the model does not."""
    languages: Mapping[str, str] = field(default_factory=dict)
    """ISO 639-1 → what `language` calls it; {}: the model takes no language."""
    language: str = ""
    """How the response begins, or `prompt` goes on, where the language is known: "{}" stands for
    what it is called."""
    marker: str = ""
    """The text comes behind this in the response, once."""
    takes_text: bool = False
    """Whether text that comes before may be the system's message."""
    prompt: str | None = None
    """The whole prompt, of models whose chat template does not ask so: "{}" stands for `language`.
    """
    sampling_rate: int = 16_000
    max_seconds: float = 30.0
    """Of a window."""


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
