"""Families whose recordings are read by encoders of Whisper's kind, in windows of one length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...core.protocols.audio import SpeechChat
from ...core.protocols.media import MediaSetup
from .family import Family
from .recordings import AudioEncoder, FeatureExtractor


def conv_rows(frames: int) -> int:
    """Return the rows of the second convolution, which skips every other frame."""
    return (frames - 1) // 2 + 1


# ---------------------------------------------------------------- Qwen2-Audio


class Qwen2AudioFeatures(FeatureExtractor):
    """One window, of which true frames are read."""

    options = {"return_attention_mask": True, "padding": "max_length"}
    mask_name = "feature_attention_mask"

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self.max_samples = int(self.extractor.n_samples)

    def count(self, tensors: Mapping[str, np.ndarray]) -> int:
        return pooled_rows(int(tensors[self.mask_name].sum()))


def pooled_rows(frames: int) -> int:
    """Return the means of two rows each."""
    return (conv_rows(frames) - 2) // 2 + 1


class Qwen2AudioEncoder(AudioEncoder):
    def encode_one(self, item: Mapping[str, torch.Tensor]) -> torch.Tensor:
        features = item["input_features"]
        frames = int(item["feature_attention_mask"].sum())
        rows = conv_rows(features.shape[-1])
        mask = features.new_zeros(1, 1, rows, rows)
        mask[..., conv_rows(frames) :] = torch.finfo(mask.dtype).min
        hidden = self.hf.audio_tower(features, attention_mask=mask).last_hidden_state
        out: torch.Tensor = self.hf.multi_modal_projector(hidden)[0, : pooled_rows(frames)]
        return out


class Qwen2Audio(Family):
    modalities = ("audio",)
    processors = {"audio": Qwen2AudioFeatures}
    encoder_class = Qwen2AudioEncoder


# ---------------------------------------------------------------- Voxtral


class VoxtralFeatures(FeatureExtractor):
    """Any number of windows; the last is filled with silence, and read like the others."""

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        own = self.config.audio_config
        self._frames = 2 * own.max_source_positions
        self._rows = own.max_source_positions * own.hidden_size // own.intermediate_size

    def tensors(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        out = self.extractor(
            samples, sampling_rate=self.sampling_rate, return_tensors="np", padding=True,
            truncation=False, pad_to_multiple_of=self.extractor.n_samples,
        )  # fmt: skip
        [features] = out["input_features"]
        windows = features.reshape(len(features), -1, self._frames).swapaxes(0, 1)
        return {"input_features": windows}

    def count(self, tensors: Mapping[str, np.ndarray]) -> int:
        return len(tensors["input_features"]) * int(self._rows)


VOXTRAL_LANGUAGES = ("ar", "de", "en", "es", "fr", "hi", "it", "nl", "pt")


class Voxtral(Family):
    modalities = ("audio",)
    processors = {"audio": VoxtralFeatures}
    encoder_class = AudioEncoder
    speech_chat = SpeechChat(
        prompt="[INST][BEGIN_AUDIO][AUDIO][/INST]{}[TRANSCRIBE]", language="lang:{}",
        languages={name: name for name in VOXTRAL_LANGUAGES},
    )  # fmt: skip

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        own = setup.config.audio_config
        if own.max_source_positions * own.hidden_size % own.intermediate_size:
            return "the rows of its audio_config do not divide into those of a projection"
        return None


# ---------------------------------------------------------------- Audio Flamingo 3, GLM-ASR


class WindowedFeatures(FeatureExtractor):
    """As many windows as the recording fills; of the last, true frames are read."""

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self._window = int(self.extractor.n_samples)

    def extracted(self, samples: Any) -> Mapping[str, np.ndarray]:
        starts = range(0, len(samples), self._window)
        return super().extracted([samples[start : start + self._window] for start in starts])

    def count(self, tensors: Mapping[str, np.ndarray]) -> int:
        return sum(self.rows(int(frames)) for frames in tensors[self.mask_name].sum(-1))

    def rows(self, frames: int) -> int:
        """Return the rows of a window's true frames."""
        return pooled_rows(frames)


class GlmAsrFeatures(WindowedFeatures):
    def rows(self, frames: int) -> int:
        return (conv_rows(frames) - 4) // 4 + 1


class AudioFlamingo3(Family):
    modalities = ("audio",)
    processors = {"audio": WindowedFeatures}
    encoder_class = AudioEncoder
    speech_chat = SpeechChat("Transcribe the input speech.")


class GlmAsr(Family):
    modalities = ("audio",)
    processors = {"audio": GlmAsrFeatures}
    encoder_class = AudioEncoder
    speech_chat = SpeechChat("Please transcribe this audio into text")
