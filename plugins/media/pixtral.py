"""Mistral 3 (and Pixtral's tower): pictures of any size, with a token after each row of units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...core.protocols.media import MediaSetup, ProcessedMedia
from .family import Pictures
from .processor import ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image


class PixtralProcessor(ImageProcessor):
    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        vision = self.config.vision_config
        self._side = vision.patch_size * getattr(self.config, "spatial_merge_size", 1)
        self._break, self._end = self.token("[IMG_BREAK]"), self.token("[IMG_END]")

    def image(self, image: Image) -> ProcessedMedia:
        sides = {"height": self._side, "width": self._side}
        tensors = self.images(images=[image], patch_size=sides, return_tensors="np")
        return self.processed(tensors)

    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        height, width = (int(size) for size in tensors["image_sizes"][0])
        columns = width // self._side
        tokens = [*self.repeated(columns), self._break] * (height // self._side)
        tokens[-1] = self._end
        return ProcessedMedia(
            {name: tensors[name] for name in ("pixel_values", "image_sizes")},
            tokens,
            [token == self.placeholder_id for token in tokens],
        )


class Mistral3(Pictures):
    processor_class = PixtralProcessor

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        kind = setup.config.vision_config.model_type
        return None if kind == "pixtral" else f"its tower is a {kind}, not a pixtral"
