"""Granite Speech: mel bands of two frames each, a conformer, and a Q-Former."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ...core.protocols.audio import SpeechChat
from ...core.protocols.media import MediaSetup
from ..models.whisper import triangles
from .family import Family
from .recordings import AudioEncoder, FeatureExtractor

WINDOWS = {"n_fft": 512, "win_length": 400, "hop_length": 160, "n_mels": 80}
"""Of extractors whose configuration does not say otherwise."""


class GraniteFeatures(FeatureExtractor):
    """Computed here: the extractor of `transformers` takes torchaudio."""

    def load(self, setup: MediaSetup) -> Any:
        from transformers.feature_extraction_utils import FeatureExtractionMixin

        fields, _ = FeatureExtractionMixin.get_feature_extractor_dict(setup.folder)
        windows = {**WINDOWS, **(fields.get("melspec_kwargs") or {})}
        windows["n_mels"] = fields.get("feature_size") or windows["n_mels"]
        windows = {name: int(windows[name]) for name in WINDOWS}
        rate = int(fields.get("sampling_rate") or 16_000)
        return SimpleNamespace(
            sampling_rate=rate, **windows, to_dict=lambda: {**windows, "sampling_rate": rate}
        )

    @cached_property
    def _filters(self) -> torch.Tensor:
        """[n_mels, n_fft / 2 + 1] on the mel scale of HTK"""
        own = self.extractor
        half = own.sampling_rate / 2
        top = 2595.0 * math.log10(1.0 + half / 700.0)
        edges = 700.0 * (10.0 ** (np.linspace(0.0, top, own.n_mels + 2) / 2595.0) - 1.0)
        filters = triangles(edges, np.linspace(0.0, half, own.n_fft // 2 + 1))
        return torch.from_numpy(filters.astype(np.float32))

    def tensors(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        own = self.extractor
        spectrum = torch.stft(
            torch.from_numpy(samples), own.n_fft, own.hop_length, own.win_length,
            torch.hann_window(own.win_length), return_complex=True,
        )  # fmt: skip
        bands = (self._filters @ spectrum.abs().square()).clamp(min=1e-10).log10()
        bands = bands.maximum(bands.max() - 8.0) / 4.0 + 1.0
        frames = bands.T[: bands.shape[1] // 2 * 2]
        return {"input_features": frames.reshape(1, -1, 2 * own.n_mels).numpy()}

    def count(self, tensors: Mapping[str, np.ndarray]) -> int:
        config = self.config
        blocks = math.ceil(tensors["input_features"].shape[1] / config.window_size)
        return int(blocks * (config.window_size // config.downsample_rate))


class GraniteSpeech(Family):
    modalities = ("audio",)
    processors = {"audio": GraniteFeatures}
    encoder_class = AudioEncoder
    speech_chat = SpeechChat(
        "can you transcribe the speech into a written format?",
        translation="translate the speech to English",
    )

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        if setup.config.has_lora_adapter and any(setup.folder.glob("adapter_model.*")):
            return (
                "its adapter (adapter_model.safetensors) is on for prompts with recordings alone, "
                "which is not done yet; merge it into the weights"
            )
        return None
