"""Qwen2.5-Omni's and Qwen3-Omni's thinkers: pictures, recordings and videos, and text as the
answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from ...core.errors import ConfigError
from ...core.nn.context import BuildContext
from ...core.parts.media import PlacedItem
from ...core.protocols.media import MediaEncoder, MediaProcessor, MediaSetup, ProcessedMedia, Video
from .chunked_audio import rows_in_chunks
from .encoder import TransformersEncoder
from .family import Family
from .mrope import positions_of
from .qwen_video import QwenVideo
from .qwen_vl import Qwen3Encoder, Qwen3VL, QwenEncoder, QwenPictures, QwenProcessor
from .recordings import AudioEncoder, FeatureExtractor
from .sound_in_video import OPTION, ORDER, in_chunks, merged, sound_rows, times_of
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


def order_in_chunks(config: Any, times: np.ndarray, sound: int) -> np.ndarray:
    """Return the order of units at these times and of rows of sound."""
    chunk = int(config.position_id_per_seconds * config.seconds_per_chunk)
    return in_chunks(times, sound, chunk)


def order_by_time(config: Any, times: np.ndarray, sound: int) -> np.ndarray:
    return merged(times, sound)


class OmniVideo(QwenVideo):
    """With its sound, if that is asked for."""

    sized_by_checkpoint = False
    features_class: ClassVar[type[OmniFeatures]] = OmniFeatures
    sound_rate: int | None = None
    sound_order = staticmethod(order_in_chunks)

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self._setup = setup
        is_heard = setup.processor_kwargs.get(OPTION, False)
        if not isinstance(is_heard, bool):
            raise ConfigError(
                f"mm_processor_kwargs: {OPTION}: must be true or false, got {is_heard!r}",
                param="mm_processor_kwargs",
            )
        if is_heard:
            self._features = self.features_class(setup)
            self.sound_rate = self._features.sampling_rate
            self.fingerprint += self._features.fingerprint

    def lowered(self, options: Mapping[str, Any]) -> OmniVideo:
        """See `protocols.media.ImageProcessor.lowered`."""
        given = {**self._setup.processor_kwargs, **options}
        return type(self)(dataclasses.replace(self._setup, processor_kwargs=given))

    def video(self, video: Video) -> ProcessedMedia:
        seen = super().video(video)
        if video.sound is None or self.sound_rate is None:
            return seen
        heard = self._features.audio(video.sound[: self._features.max_samples])
        times = times_of(seen.frame_positions, seen.grid)
        order = self.sound_order(self.config, times, len(heard.token_ids))
        tokens = np.asarray([*seen.token_ids, *heard.token_ids])[order]
        begin, end = self.config.audio_start_token_id, self.config.audio_end_token_id
        return dataclasses.replace(
            seen,
            tensors={**seen.tensors, **heard.tensors, ORDER: order},
            token_ids=[begin, *tokens.tolist(), end],
            embedded=[False, *[True] * len(tokens), False],
        )

    @property
    def positions_per_second(self) -> float:
        return float(self.config.position_id_per_seconds)


class Qwen3OmniVideo(OmniVideo):
    features_class = Qwen3OmniFeatures
    sound_order = staticmethod(order_by_time)
    patch_size = 16
    least_pixels = 128 * 32 * 32
    most_pixels = 768 * 32 * 32


HEARD = {"input_features", OmniFeatures.mask_name, ORDER}


class OmniEncoder(AudioEncoder, QwenEncoder):
    class_name = "Qwen2_5OmniThinkerForConditionalGeneration"
    sound_order = staticmethod(order_in_chunks)
    marks_together = True
    """Sound begins and ends at the positions where its video does."""

    def __init__(self, setup: MediaSetup, build: BuildContext) -> None:
        super().__init__(setup, build)
        self._config = setup.config

    def positions(self, items: Sequence[PlacedItem], num_tokens: int) -> tuple[np.ndarray, int]:
        def order(item: PlacedItem) -> np.ndarray:
            times = times_of(item.frame_positions, item.grid)
            return self.sound_order(self._config, times, sound_rows(item))

        return positions_of(
            items, num_tokens, behind_frames=True, sound_order=order,
            marks_together=self.marks_together,
        )  # fmt: skip

    def encode(self, items: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Encode what is seen of all items together, then what is heard of each."""
        seen = [
            {name: tensor for name, tensor in item.items() if name not in HEARD} for item in items
        ]
        heard = [{name: item[name] for name in item.keys() & HEARD - {ORDER}} for item in items]
        rows: list[list[torch.Tensor]] = [[] for _ in items]
        if places := [place for place, own in enumerate(seen) if own]:
            encoded = super().encode([seen[place] for place in places])
            for place, own in zip(places, encoded, strict=True):
                rows[place].append(own)
        for place, tensors in enumerate(heard):
            if tensors:
                rows[place].append(self.encode_one(self.prepared(tensors)))
        return [
            torch.cat(own)[item[ORDER]] if ORDER in item else own[0]
            for own, item in zip(rows, items, strict=True)
        ]

    def heard(self, output: Any) -> torch.Tensor:
        rows: torch.Tensor = output.last_hidden_state
        return rows.reshape(-1, rows.shape[-1])


class Qwen3OmniEncoder(OmniEncoder, Qwen3Encoder):
    class_name = "Qwen3OmniMoeThinkerForConditionalGeneration"
    sound_order = staticmethod(order_by_time)
    marks_together = False

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
        own = thinker(setup)
        if modality != "video":
            others = {name: v for name, v in own.processor_kwargs.items() if name != OPTION}
            own = dataclasses.replace(own, processor_kwargs=others)
        return super().processor(own, modality)

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
