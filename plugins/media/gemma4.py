"""Gemma 4: pictures of about the same number of patches, whose tokens see each other in layers with
a window; and recordings, read by a conformer (USM, arXiv 2303.01037)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from ...core.protocols.media import MediaProcessor, MediaSetup, ProcessedMedia, Spans
from .family import Family
from .gemma4_video import Gemma4Video
from .processor import ImageProcessor
from .recordings import AudioEncoder, FeatureExtractor


class Gemma4Processor(ImageProcessor):
    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        kept = {name: tensors[name] for name in ("pixel_values", "image_position_ids")}
        stands = self.of_count(int(tensors["num_soft_tokens_per_image"][0]))
        return dataclasses.replace(stands, tensors=kept)

    def of_count(self, count: int) -> ProcessedMedia:
        config = self.config
        tokens = [config.boi_token_id, *self.repeated(count), config.eoi_token_id]
        return ProcessedMedia({}, tokens, [False, *[True] * count, False])


class Gemma4Features(FeatureExtractor):
    """One row for four frames, at most 30 seconds."""

    options: ClassVar[Mapping[str, Any]] = {}
    max_seconds = 30

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self.max_samples = self.max_seconds * self.sampling_rate

    def tensors(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        features = self.extracted([samples])  # Alone, some lengths are not taken.
        return {name: features[name] for name in ("input_features", self.mask_name)}

    def count(self, tensors: Mapping[str, np.ndarray]) -> int:
        # Two convolutions skip every other frame.
        return int(tensors[self.mask_name][0, ::2][::2].sum())

    def written(self, count: int) -> tuple[list[int], list[bool]]:
        begin, end = self.config.boa_token_id, self.config.eoa_token_index
        return [begin, *[self.placeholder_id] * count, end], [False, *[True] * count, False]


class Gemma4Encoder(AudioEncoder):
    def heard(self, output: Any) -> torch.Tensor:
        rows: torch.Tensor = output.pooler_output[output.attention_mask]
        return rows


class Gemma4(Family):
    modalities = ("image", "audio", "video")
    processors: ClassVar[Mapping[str, Callable[[MediaSetup], MediaProcessor]]] = {
        "image": Gemma4Processor, "audio": Gemma4Features, "video": Gemma4Video,
    }  # fmt: skip
    encoder_class = Gemma4Encoder

    @classmethod
    def present(cls, setup: MediaSetup) -> tuple[str, ...]:
        vision, audio = setup.config.vision_config, setup.config.audio_config
        towers = {"image": vision, "audio": audio, "video": vision}
        return tuple(name for name in cls.modalities if towers[name] is not None)

    @classmethod
    def spans(cls, setup: MediaSetup) -> Spans | None:
        which = setup.config.text_config.use_bidirectional_attention
        return Spans.WINDOWED if which == "vision" else None

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        if cls.spans(setup) is not None and setup.config.audio_config is not None:
            return "tokens of its pictures see each other, and those of its recordings do not"
        return None
