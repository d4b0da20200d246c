"""Llama 4: a picture in tiles on the canvas that fits it best, then the whole in one tile."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...core.errors import ConfigError
from ...core.loading.json_file import read_object
from ...core.protocols.media import MediaSetup, ProcessedMedia
from .encoder import TransformersEncoder
from .family import Pictures
from .processor import NORMALISATION, OPTION, ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

OPTIONS: dict[str, Any] = {
    "size": {"height": 336, "width": 336}, "max_patches": 16, "resize_to_max_canvas": False,
    "resample": 2, "rescale_factor": 1 / 255, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
"""Of the processor of `transformers`, which takes torchvision, with its defaults."""


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


class Llama4Processor(ImageProcessor):
    def __init__(self, setup: MediaSetup) -> None:
        self.setup, given = setup, dict(setup.processor_kwargs)
        if unknown := sorted(given.keys() - OPTIONS.keys()):
            raise ConfigError(
                f"{OPTION}: Llama4Processor has no option {', '.join(unknown)}", param=OPTION
            )
        own: dict[str, Any] = {}
        for name in ("preprocessor_config.json", "processor_config.json"):
            if (setup.folder / name).is_file():
                read = read_object(setup.folder / name)
                own |= read.get("image_processor", read)
        options = {name: {**own, **given}.get(name, value) for name, value in OPTIONS.items()}
        self._most_tiles: int = options["max_patches"]
        self._tile: int = options["size"]["height"]
        self._possible = canvases(options["max_patches"]) * self._tile
        self._largest: bool = options["resize_to_max_canvas"]
        self._resample: int = options["resample"]
        rows = [[options["rescale_factor"]] * 3, options["image_mean"], options["image_std"]]
        self._levels = np.asarray(rows, dtype=np.float32)
        self.config, self._tokens = setup.config, setup.tokenize
        self.placeholder_id = self.token("<|image|>")
        self._start, self._end = self.token("<|image_start|>"), self.token("<|image_end|>")
        self._between = self.token("<|tile_x_separator|>"), self.token("<|tile_y_separator|>")
        vision = self.config.vision_config
        side = self._tile // vision.patch_size
        count = side * side // round(1 / vision.pixel_shuffle_ratio**2)
        self._patches = [int(self.config.image_token_index)] * count
        text = f"llama4 {json.dumps(options, sort_keys=True)}"
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def most(self, name: str) -> int | None:
        return self._most_tiles if name == "max_patches" else None

    def image(self, image: Image) -> ProcessedMedia:
        canvas = self._canvas(image)
        rows, columns = canvas.shape[0] // self._tile, canvas.shape[1] // self._tile
        grid = canvas.reshape(rows, self._tile, columns, self._tile, 3).swapaxes(1, 2)
        tiles = [*grid.reshape(rows * columns, self._tile, self._tile, 3)]
        if rows * columns > 1:
            whole = image.resize((self._tile, self._tile), self._resample)
            tiles.append(np.asarray(whole))
        tokens = self._placed(rows, columns)
        return ProcessedMedia(
            {
                "pixel_values": np.stack(tiles).transpose(0, 3, 1, 2),
                NORMALISATION: self._levels,
            },
            tokens,
            [token == self._patches[0] for token in tokens],
        )

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
        own = np.asarray(image.resize((own_width, own_height), self._resample))
        canvas[:own_height, :own_width] = own
        return canvas

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
