"""Mistral 3 (and Pixtral's tower): pictures of any size, with a token after each row of units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...core.protocols.media import MediaSetup, ProcessedMedia
from .family import Pictures
from .processor import ImageProcessor, check_count, check_fields, sizes_of

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
        kept = {name: tensors[name] for name in ("pixel_values", "image_sizes")}
        return self._written(kept, height // self._side, width // self._side)

    def of_rows(self, count: int, fields: Mapping[str, np.ndarray]) -> Sequence[ProcessedMedia]:
        name = "image_sizes"
        check_fields(fields, name)
        grids = [[side // self._side for side in sizes] for sizes in sizes_of(fields, name, 2)]
        check_count(count, [math.prod(grid) for grid in grids], name)
        return [self._written({}, *grid) for grid in grids]

    def _written(
        self, tensors: Mapping[str, np.ndarray], lines: int, columns: int
    ) -> ProcessedMedia:
        tokens = [*self.repeated(columns), self._break] * lines
        tokens[-1:] = [self._end]
        embedded = [token == self.placeholder_id for token in tokens]
        return ProcessedMedia(tensors, tokens, embedded)


class Mistral3(Pictures):
    processor_class = PixtralProcessor

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        kind = setup.config.vision_config.model_type
        return None if kind == "pixtral" else f"its tower is a {kind}, not a pixtral"
