"""Gemma 4: pictures of about the same number of patches, whose tokens see each other in layers with
a window."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...core.protocols.media import MediaSetup, ProcessedMedia, Spans
from .encoder import TransformersEncoder
from .family import Pictures
from .processor import ImageProcessor


class Gemma4Processor(ImageProcessor):
    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        config = self.config
        count = int(tensors["num_soft_tokens_per_image"][0])
        tokens = [config.boi_token_id, *self.repeated(count), config.eoi_token_id]
        return ProcessedMedia(
            {name: tensors[name] for name in ("pixel_values", "image_position_ids")},
            tokens,
            [False, *[True] * count, False],
        )


class Gemma4Encoder(TransformersEncoder):
    text_modules = ("language_model", "audio_tower", "embed_audio")


class Gemma4(Pictures):
    processor_class = Gemma4Processor
    encoder_class = Gemma4Encoder

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        return "it has no tower" if setup.config.vision_config is None else None

    @classmethod
    def spans(cls, setup: MediaSetup) -> Spans | None:
        which = setup.config.text_config.use_bidirectional_attention
        return Spans.WINDOWED if which == "vision" else None
