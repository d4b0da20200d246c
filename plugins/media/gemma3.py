"""Gemma 3: pictures of one size, whose tokens see each other in both directions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ...core.protocols.media import MediaSetup, ProcessedMedia, Spans
from .family import Pictures
from .processor import ImageProcessor


class Gemma3Processor(ImageProcessor):
    around = ("\n\n", "\n\n")
    in_bytes = True

    def find_placeholder(self, setup: MediaSetup) -> int:
        return int(setup.config.boi_token_index)

    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        kept = {name: tensor for name, tensor in tensors.items() if name != "num_crops"}
        stands = self.of_count(self.config.mm_tokens_per_image)
        return dataclasses.replace(stands, tensors=kept)

    def of_count(self, count: int) -> ProcessedMedia:
        config = self.config
        tokens = [config.boi_token_index, *[config.image_token_id] * count, config.eoi_token_index]
        return ProcessedMedia({}, tokens, [False, *[True] * count, False])


class Gemma3(Pictures):
    processor_class = Gemma3Processor

    @classmethod
    def spans(cls, setup: MediaSetup) -> Spans:
        return Spans.ALL
