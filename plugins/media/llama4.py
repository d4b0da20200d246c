"""Llama 4: a picture in tiles on the canvas that fits it best, then the whole in one tile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...core.protocols.media import MediaSetup, ProcessedMedia
from .encoder import TransformersEncoder
from .family import Pictures
from .pillow import PillowImages, PillowProcessor, cut
from .processor import NORMALISATION

if TYPE_CHECKING:
    from PIL.Image import Image
GRID = "grid"
"""Name of a picture's (rows, columns) of tiles."""


def canvases(most: int) -> np.ndarray:
    """Return (rows, columns) of all canvases of at most so many tiles, those of one shape
    together, [n, 2]."""
    by_shape: dict[float, list[tuple[int, int]]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                columns = count // rows
                by_shape.setdefault(rows / columns, []).append((rows, columns))
    return np.array([canvas for alike in by_shape.values() for canvas in alike])


def best_canvas(sides: tuple[int, int], possible: np.ndarray, largest: bool) -> tuple[int, int]:
    """Return the possible (height, width) that enlarges a picture least, or else shrinks it least,
    or that enlarges it most; of several the smallest."""
    scales = (possible.astype(np.float32) / np.asarray(sides, dtype=np.float32)).min(axis=1)
    enlarging = scales[scales >= 1]
    if len(enlarging):
        scale = enlarging.max() if largest else enlarging.min()
    else:
        scale = scales.max()
    chosen = possible[scales == scale]
    height, width = chosen[chosen.prod(axis=1).argmin()]
    return int(height), int(width)


def within(sides: tuple[int, int], bounds: tuple[int, int]) -> tuple[int, int]:
    """Return the largest size of a picture's shape within bounds."""
    (height, width), (most_height, most_width) = sides, bounds
    by_width, by_height = most_width / width, most_height / height
    if by_width < by_height:
        return max(1, min(math.floor(height * by_width), most_height)), most_width
    return most_height, max(1, min(math.floor(width * by_height), most_width))


class Llama4Images(PillowImages):
    defaults = {
        "size": {"height": 336, "width": 336}, "max_patches": 16, "resize_to_max_canvas": False,
    }  # fmt: skip

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self._tile: int = self.options["size"]["height"]
        self._possible = canvases(self.options["max_patches"]) * self._tile
        self._largest: bool = self.options["resize_to_max_canvas"]

    def tensors(self, image: Image) -> dict[str, Any]:
        canvas, side = self._canvas(image), self._tile
        tiles = cut(canvas, side)
        if len(tiles) > 1:
            tiles = np.concatenate([tiles, self.resized(image, side, side)[None]])
        rows, columns = canvas.shape[0] // side, canvas.shape[1] // side
        return {"pixel_values": tiles.transpose(0, 3, 1, 2), GRID: (rows, columns)}

    def _canvas(self, image: Image) -> np.ndarray:
        """Return the picture in a corner of its canvas, [height, width, 3]."""
        sides = image.height, image.width
        height, width = best_canvas(sides, self._possible, self._largest)
        bounds = height, width
        if not self._largest:
            # It is not enlarged beyond one tile.
            bounds = min(max(sides[0], self._tile), height), min(max(sides[1], self._tile), width)
        own_height, own_width = within(sides, bounds)
        canvas = np.zeros((height, width, 3), dtype=np.uint8)
        canvas[:own_height, :own_width] = self.resized(image, own_height, own_width)
        return canvas


class Llama4Processor(PillowProcessor):
    images_class = Llama4Images

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self._start, self._end = self.token("<|image_start|>"), self.token("<|image_end|>")
        self._between = self.token("<|tile_x_separator|>"), self.token("<|tile_y_separator|>")
        vision = self.config.vision_config
        side = self.images.options["size"]["height"] // vision.patch_size
        count = side * side // round(1 / vision.pixel_shuffle_ratio**2)
        self._patches = [int(self.config.image_token_index)] * count

    def find_placeholder(self, setup: MediaSetup) -> int:
        return self.token("<|image|>")

    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        tokens = self._placed(*(int(count) for count in tensors[GRID]))
        return ProcessedMedia(
            {name: tensors[name] for name in ("pixel_values", NORMALISATION)},
            tokens,
            [token == self._patches[0] for token in tokens],
        )

    def _placed(self, rows: int, columns: int) -> Sequence[int]:
        tokens = [self._start]
        if rows * columns > 1:
            beside, below = self._between
            line = [*self._patches, beside] * columns
            line[-1] = below
            tokens += line * rows
        return [*tokens, self.placeholder_id, *self._patches, self._end]


class Llama4Encoder(TransformersEncoder):
    def normalised(self, pixels: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
        """In bfloat16, as the model was trained."""
        factor, mean, deviation = parameters.view(3, *self.channels)
        scaled = (pixels * factor.to(torch.float32)).to(torch.bfloat16)
        pixels = (scaled - mean.bfloat16()) / deviation.bfloat16()
        return pixels.to(self.dtype)

    def encode_together(
        self, items: Sequence[Mapping[str, torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        pixels = torch.cat([item["pixel_values"] for item in items])
        states = self.hf.vision_model(pixels).last_hidden_state
        rows = self.hf.multi_modal_projector(states.flatten(0, 1))
        return list(rows.view(len(items), -1, rows.shape[-1]))


class Llama4(Pictures):
    processor_class = Llama4Processor
    encoder_class = Llama4Encoder

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        return "it has no tower" if setup.config.vision_config is None else None
