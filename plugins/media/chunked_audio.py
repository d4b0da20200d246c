"""Qwen3-ASR: recordings of any length, read in chunks of a second."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...core.protocols.audio import SpeechChat
from ...core.protocols.media import MediaSetup
from .family import Family
from .recordings import AudioEncoder, FeatureExtractor


def chunk_rows(frames: int) -> int:
    """Return the rows of a chunk, of which three convolutions skip every other one."""
    for _ in range(3):
        frames = (frames - 1) // 2 + 1
    return frames


def rows_in_chunks(frames: int, chunk: int) -> int:
    """Return the rows of chunks, the last of which may be shorter."""
    return frames // chunk * chunk_rows(chunk) + chunk_rows(frames % chunk)


class Qwen3AsrFeatures(FeatureExtractor):
    options = {"return_attention_mask": True, "padding": True, "truncation": False}

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self._chunk = 2 * setup.config.audio_config.n_window
        self.extractor.n_window = setup.config.audio_config.n_window  # Whole chunks are read.

    def count(self, tensors: Mapping[str, np.ndarray]) -> int:
        return rows_in_chunks(int(tensors[self.mask_name].sum()), self._chunk)


LANGUAGES = {
    "ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English",
    "es": "Spanish", "fa": "Persian", "fi": "Finnish", "fil": "Filipino", "fr": "French",
    "hi": "Hindi", "hu": "Hungarian", "id": "Indonesian", "it": "Italian", "ja": "Japanese",
    "ko": "Korean", "mk": "Macedonian", "ms": "Malay", "nl": "Dutch", "pl": "Polish",
    "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sv": "Swedish", "th": "Thai",
    "tr": "Turkish", "vi": "Vietnamese", "yue": "Cantonese", "zh": "Chinese",
}  # fmt: skip


class Qwen3Asr(Family):
    modalities = ("audio",)
    processors = {"audio": Qwen3AsrFeatures}
    encoder_class = AudioEncoder
    speech_chat = SpeechChat(
        languages=LANGUAGES, language="language {}<asr_text>", marker="<asr_text>",
        takes_text=True,
    )  # fmt: skip
