"""LFM2-VL: pictures of about their own size, large ones in tiles, then the whole."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .derived import Derived
from .encoder import TransformersEncoder
from .pillow import DerivedPillowProcessor, PillowImages, closest_grid, cut, grids

if TYPE_CHECKING:
    from PIL.Image import Image


class Lfm2VlImages(PillowImages):
    defaults = {
        "downsample_factor": 2, "do_image_splitting": True, "min_tiles": 2, "max_tiles": 10,
        "use_thumbnail": True, "min_image_tokens": 64, "max_image_tokens": 256,
        "encoder_patch_size": 16, "tile_size": 512, "max_pixels_tolerance": 2.0,
    }  # fmt: skip

    def tensors(self, image: Image) -> dict[str, Any]:
        options, (height, width) = self.options, self._own_size(image)
        whole = self.resized(image, height, width)
        columns, rows = self._grid(image)
        parts = [whole]
        if columns * rows > 1:
            side = options["tile_size"]
            parts = [*cut(self.resized(image, rows * side, columns * side), side)]
            if options["use_thumbnail"]:
                parts.append(whole)
        patches = [self._patches(part) for part in parts]
        counts = [len(each) for each in patches]
        pixels = np.zeros((len(parts), max(counts), patches[0].shape[1]), dtype=np.uint8)
        for part, own in zip(pixels, patches, strict=True):
            part[: len(own)] = own
        side = options["encoder_patch_size"]
        return {
            "pixel_values": pixels,
            "pixel_attention_mask": np.arange(max(counts)) < np.array(counts)[:, None],
            "spatial_shapes": np.array([[n // side for n in part.shape[:2]] for part in parts]),
            "image_rows": [rows], "image_cols": [columns], "image_sizes": [[height, width]],
        }  # fmt: skip

    def _own_size(self, image: Image) -> tuple[int, int]:
        """Return the size of a picture in whole tokens, between the bounds."""
        unit, sides = self._unit, (image.height, image.width)
        height, width = (max(unit, round(side / unit) * unit) for side in sides)
        area = image.height * image.width
        least, most = (self.options[f"{name}_image_tokens"] * unit**2 for name in ("min", "max"))
        if height * width > most:
            scale = math.sqrt(area / most)
            height, width = (max(unit, math.floor(side / scale / unit) * unit) for side in sides)
        elif height * width < least:
            scale = math.sqrt(least / area)
            height, width = (math.ceil(side * scale / unit) * unit for side in sides)
        return height, width

    def _grid(self, image: Image) -> tuple[int, int]:
        """Return the columns and rows of a picture's tiles."""
        options, unit, patch = self.options, self._unit, self.options["encoder_patch_size"]
        sides = (max(patch, round(side / unit) * unit) for side in image.size)
        bound = options["max_image_tokens"] * unit**2 * options["max_pixels_tolerance"]
        least, most = options["min_tiles"], options["max_tiles"]
        if not options["do_image_splitting"] or most == 1 or math.prod(sides) <= bound:
            return 1, 1
        return closest_grid(grids(least, most), *image.size, options["tile_size"])

    @property
    def _unit(self) -> int:
        """Pixels of a token's side."""
        unit: int = self.options["encoder_patch_size"] * self.options["downsample_factor"]
        return unit

    def _patches(self, pixels: np.ndarray) -> np.ndarray:
        """[height, width, 3] → [patches, side * side * 3]"""
        side = self.options["encoder_patch_size"]
        rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
        grid = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2)
        return grid.reshape(rows * columns, -1)


class Lfm2VlProcessor(DerivedPillowProcessor):
    images_class = Lfm2VlImages
    text_options = {"use_image_special_tokens": True}


class Lfm2VlEncoder(TransformersEncoder):
    channels = (3,)

    def normalised(self, pixels: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
        by_pixel = pixels.view(*pixels.shape[:-1], -1, 3)
        return super().normalised(by_pixel, parameters).flatten(-2)


class Lfm2Vl(Derived):
    processor_class = Lfm2VlProcessor
    encoder_class = Lfm2VlEncoder
