"""Qwen2.5-Omni's and Qwen3-Omni's thinkers: pictures, recordings and videos, and text as the
answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ...core.nn.context import BuildContext
from ...core.parts.media import PlacedItem
from ...core.protocols.media import MediaEncoder, MediaProcessor, MediaSetup
from .chunked_audio import rows_in_chunks
from .encoder import TransformersEncoder
from .family import Family
from .mrope import positions_of
from .qwen_video import QwenVideo
from .qwen_vl import Qwen3Encoder, Qwen3VL, QwenEncoder, QwenPictures, QwenProcessor
from .recordings import AudioEncoder, FeatureExtractor
from .whisper_like import pooled_rows


class OmniFeatures(FeatureExtractor):
    """One recording, of which true frames alone are read."""

    options = {"return_attention_mask": True, "padding": "max_length"}
    mask_name = "feature_attention_mask"

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self.max_samples = int(self.extractor.n_samples)

    def tensors(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        made = super().tensors(samples)
        frames = int(made[self.mask_name].sum())
        return {name: value[..., :frames] for name, value in made.items()}

    def count(self, tensors: Mapping[str, np.ndarray]) -> int:
        return self.rows(tensors[self.mask_name].shape[-1])

    def rows(self, frames: int) -> int:
        return pooled_rows(frames)


class Qwen3OmniFeatures(OmniFeatures):
    def rows(self, frames: int) -> int:
        return rows_in_chunks(frames, 2 * self.config.audio_config.n_window)


class OmniVideo(QwenVideo):
    """Without its sound."""

    sized_by_checkpoint = False

    @property
    def positions_per_second(self) -> float:
        return float(self.config.position_id_per_seconds)


class Qwen3OmniVideo(OmniVideo):
    patch_size = 16
    least_pixels = 128 * 32 * 32
    most_pixels = 768 * 32 * 32


class OmniEncoder(AudioEncoder, QwenEncoder):
    class_name = "Qwen2_5OmniThinkerForConditionalGeneration"

    def positions(self, items: Sequence[PlacedItem], num_tokens: int) -> tuple[np.ndarray, int]:
        return positions_of(items, num_tokens, behind_frames=True)

    def heard(self, output: Any) -> torch.Tensor:
        rows: torch.Tensor = output.last_hidden_state
        return rows.reshape(-1, rows.shape[-1])


class Qwen3OmniEncoder(OmniEncoder, Qwen3Encoder):
    class_name = "Qwen3OmniMoeThinkerForConditionalGeneration"

    def heard(self, output: Any) -> torch.Tensor:
        rows = super().heard(output)
        return torch.nn.functional.pad(rows, (0, self.num_levels * rows.shape[-1]))


class Omni(Family):
    modalities = ("image", "audio", "video")
    seen: ClassVar[type[QwenPictures]]
    """Whose pictures it takes."""

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        return cls.seen.refusal(thinker(setup))

    @classmethod
    def processor(cls, setup: MediaSetup, modality: str) -> MediaProcessor:
        return super().processor(thinker(setup), modality)

    @classmethod
    def encoder(cls, setup: MediaSetup, build: BuildContext) -> MediaEncoder:
        return super().encoder(thinker(setup), build)


def thinker(setup: MediaSetup) -> MediaSetup:
    """Return the setup with the configuration of the part that reads."""
    return dataclasses.replace(setup, config=setup.config.thinker_config)


class Qwen2Omni(Omni):
    seen = QwenPictures
    processors = {"image": QwenProcessor, "audio": OmniFeatures, "video": OmniVideo}
    encoder_class: ClassVar[type[TransformersEncoder]] = OmniEncoder


class Qwen3Omni(Omni):
    seen = Qwen3VL
    processors = {
        "image": QwenProcessor, "audio": Qwen3OmniFeatures, "video": Qwen3OmniVideo,
    }  # fmt: skip
    encoder_class: ClassVar[type[TransformersEncoder]] = Qwen3OmniEncoder
