"""InternVL: pictures in tiles of one size, with the whole as the last one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...core.protocols.media import MediaSetup, ProcessedMedia
from .family import Pictures
from .processor import ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image


class InternVLProcessor(ImageProcessor):
    in_bytes = True

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self._begin, self._end = self.token("<img>"), self.token("</img>")
        self._tiles = bool(setup.processor_kwargs.get("crop_to_patches", True))

    def image(self, image: Image) -> ProcessedMedia:
        return self.processed(self.tensors(image, crop_to_patches=self._tiles))

    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        pixels, patch = tensors["pixel_values"], self.config.vision_config.patch_size
        factor = self.config.downsample_ratio
        sides = [
            int(size // side * factor) for size, side in zip(pixels.shape[-2:], patch, strict=True)
        ]
        count = len(pixels) * sides[0] * sides[1]
        tokens = [self._begin, *self.repeated(count), self._end]
        kept = {name: tensor for name, tensor in tensors.items() if name != "num_patches"}
        return ProcessedMedia(kept, tokens, [token == self.placeholder_id for token in tokens])


class InternVL(Pictures):
    processor_class = InternVLProcessor
