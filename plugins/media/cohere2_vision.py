"""Cohere 2 Vision: pictures in tiles that enlarge them least, then the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .derived import Derived
from .pillow import DerivedPillowProcessor, PillowImages, cut

if TYPE_CHECKING:
    from PIL.Image import Image


def least_enlarging(width: int, height: int, side: int, most: int) -> tuple[int, int]:
    """Return the (columns, rows) of at most so many tiles that enlarge a picture least, or else
    shrink it least."""
    grids = [(n, m) for n in range(1, most + 1) for m in range(1, most // n + 1)]
    grids.sort(key=lambda grid: grid[0] * grid[1])
    scales = [min(n * side / width, m * side / height) for n, m in grids]
    scale = min((each for each in scales if each >= 1), default=max(scales))
    return grids[scales.index(scale)]


class Cohere2VisionImages(PillowImages):
    defaults = {
        "size": {"height": 512, "width": 512}, "crop_to_patches": True, "max_patches": 12,
        "patch_size": 16, "resample": 3,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip

    def tensors(self, image: Image) -> dict[str, Any]:
        side, most = self.options["size"]["height"], self.options["max_patches"]
        columns = rows = 1
        if self.options["crop_to_patches"]:
            columns, rows = least_enlarging(*image.size, side, most)
        tiles = cut(self.resized(image, rows * side, columns * side), side)
        if len(tiles) > 1:
            tiles = np.concatenate([tiles, self.resized(image, side, side)[None]])
        return {"pixel_values": tiles.transpose(0, 3, 1, 2), "num_patches": [len(tiles)]}


class Cohere2VisionProcessor(DerivedPillowProcessor):
    images_class = Cohere2VisionImages


class Cohere2Vision(Derived):
    processor_class = Cohere2VisionProcessor
